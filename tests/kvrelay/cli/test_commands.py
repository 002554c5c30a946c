"""The commands as a user runs them, as processes, against a small server in this one."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from support.served import Served

from kvrelay import errors
from kvrelay.v1 import admin_pb2, admin_pb2_grpc, common_pb2, inference_pb2_grpc, model_pb2, model_pb2_grpc
from kvrelay.v1 import inference_pb2 as pb

MAIN = (sys.executable, "-m", "kvrelay.cli.main")


class Inference(inference_pb2_grpc.InferenceServiceServicer):
    """Answers with max_tokens tokens; the text of the prompt may ask for trouble."""

    def __init__(self) -> None:
        self.requests: list[pb.GenerateRequest] = []
        self.left = threading.Event()

    async def Generate(self, request, context):
        self.requests.append(request)
        if request.text == "refuse":
            raise errors.InvalidArgument("sampling.top_p: must be above 0", field="sampling.top_p")
        yield pb.GenerateResponse(accepted=pb.Accepted(request_id="r1", prompt_tokens=3, seed=7, model="m"))
        sequences = range(request.n or 1)
        try:
            for index in range(request.max_tokens):
                for s in sequences:
                    yield pb.GenerateResponse(
                        token=pb.Token(sequence=s, index=index, token_id=index, text=f"é{index} ")
                    )
            if request.text == "break":
                raise errors.Unavailable("worker decode-0 was lost")
            if request.text == "hang":
                await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.left.set()
            raise
        usage = pb.Usage(prompt_tokens=3, completion_tokens=request.max_tokens)
        cost = pb.HandOff(transport="nixl", num_blocks=2, num_bytes=64, seconds=0.5, exposed_s=0.25)
        for s in reversed(sequences):
            yield pb.GenerateResponse(
                finished=pb.Finished(
                    sequence=s,
                    reason=common_pb2.FINISH_REASON_LENGTH,
                    text="end" if s == 0 else f"end of {s}",
                    usage=usage,
                    prefill_worker="p",
                    decode_worker="d",
                    hand_off=cost,
                    migrations=1,
                )
            )


class Models(model_pb2_grpc.ModelServiceServicer):
    async def GetModel(self, request, context):
        identity = common_pb2.ModelIdentity(model_id="m", vocab_size=9)
        return model_pb2.GetModelResponse(identity=identity, context_limit=64)


class Admin(admin_pb2_grpc.AdminServiceServicer):
    async def GetTopology(self, request, context):
        about = common_pb2.WorkerDescription(worker_id="d1", role=common_pb2.ROLE_DECODE, incarnation="i", pid=7)
        counts = common_pb2.BlockCounts(total=8, free=5, held=1, cached=1, reserved=1)
        load = common_pb2.Load(
            blocks=counts,
            running=2,
            waiting=1,
            transfers_in_flight=3,
            tokens_per_s=4.5,
            draining=True,
            counters={"quarantined": 2, "forced": 0, "bad_checksum": 1},
        )
        return admin_pb2.GetTopologyResponse(
            workers=[admin_pb2.WorkerStatus(description=about, load=load)], coordinator_id="c", counters={"migrated": 3}
        )


@pytest.fixture(scope="module")
def serving() -> Iterator[Served]:
    served = Served(Inference(), Models(), Admin())
    yield served
    served.close()


def kvrelay(*arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("KVRELAY_")}
    return subprocess.run(
        [*MAIN, *arguments], input=stdin, capture_output=True, timeout=60, check=False, env=environment
    )


def test_generate_streams_the_text_and_nothing_else(serving):
    done = kvrelay("generate", "--target", serving.target, "--max-tokens", "2", "hello")
    assert (done.returncode, done.stdout.decode(), done.stderr) == (0, "é0 é1 end\n", b"")
    request = serving.inference.requests[-1]
    assert (request.text, request.max_tokens, request.HasField("sampling")) == ("hello", 2, False)


def test_generate_as_json_is_one_object_with_everything(serving):
    done = kvrelay("generate", "--target", serving.target, "--json", "--max-tokens", "3", "--seed", "7", "hello")
    answer = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (0, b"")
    assert answer.pop("ttft_ms") > 0
    assert len(answer.pop("gaps_ms")) == 2
    assert answer == {
        "request_id": "r1",
        "token_ids": [0, 1, 2],
        "text": "é0 é1 é2 end",
        "finish_reason": "length",
        "usage": {"prompt_tokens": 3, "completion_tokens": 3, "cached_tokens": 0},
        "prefill_worker": "p",
        "decode_worker": "d",
        "seed": 7,
        "model": "m",
        "hand_off": {
            "transport": "nixl",
            "num_blocks": 2,
            "num_bytes": 64,
            "seconds": 0.5,
            "exposed_s": 0.25,
            "num_cached_blocks": 0,
        },
        "migrations": 1,
    }


def test_several_answers_are_written_whole_as_they_end_with_their_numbers_on_stderr(serving):
    done = kvrelay("generate", "--target", serving.target, "--max-tokens", "2", "-n", "3", "--no-prefix-cache", "hello")
    assert (done.returncode, done.stdout.decode()) == (0, "é0 é1 end of 2\né0 é1 end of 1\né0 é1 end\n")
    assert done.stderr == b"[3 of 3: length]\n[2 of 3: length]\n[1 of 3: length]\n"
    request = serving.inference.requests[-1]
    assert (request.n, request.HasField("prefix_cache"), request.prefix_cache) == (3, True, False)


def test_several_answers_as_json_are_the_choices_of_one_object(serving):
    done = kvrelay("generate", "--target", serving.target, "--json", "--max-tokens", "2", "-n", "2", "hello")
    answer = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (0, b"")
    assert [(c["sequence"], c["text"]) for c in answer["choices"]] == [(0, "é0 é1 end"), (1, "é0 é1 end of 1")]
    assert (answer["text"], answer["token_ids"]) == ("é0 é1 end", [0, 1])
    own = {key: value for key, value in answer["choices"][0].items() if key != "sequence"}
    assert own == {key: answer[key] for key in own}


def test_a_prompt_comes_from_stdin_a_file_of_ids_or_as_chat(serving, tmp_path):
    ask = ("generate", "--target", serving.target, "--max-tokens", "1")
    kvrelay(*ask, "-", stdin="grüße\n".encode())
    assert serving.inference.requests[-1].text == "grüße\n"
    (tmp_path / "ids").write_text("[1, 2, 3]")
    kvrelay(*ask, "--tokens", str(tmp_path / "ids"))
    assert list(serving.inference.requests[-1].tokens.ids) == [1, 2, 3]
    kvrelay(*ask, "--chat", "hi")
    messages = serving.inference.requests[-1].chat.messages
    assert [(m.role, m.content) for m in messages] == [("user", "hi")]


def test_an_error_as_json_leaves_stdout_empty(serving):
    done = kvrelay("generate", "--target", serving.target, "--json", "refuse")
    assert (done.returncode, done.stdout) == (1, b"")
    assert json.loads(done.stderr) == {
        "error": {
            "code": "INVALID_ARGUMENT",
            "message": "sampling.top_p: must be above 0",
            "field": "sampling.top_p",
        }
    }


def test_an_error_in_the_middle_is_one_line_and_with_json_nothing_of_the_answer(serving):
    done = kvrelay("generate", "--target", serving.target, "--max-tokens", "1", "break")
    assert (done.returncode, done.stdout.decode()) == (1, "é0 \n")
    assert done.stderr == b"kvrelay: worker decode-0 was lost\n"
    done = kvrelay("generate", "--target", serving.target, "--json", "--max-tokens", "1", "break")
    assert (done.returncode, done.stdout) == (1, b"")
    assert json.loads(done.stderr)["error"]["code"] == "UNAVAILABLE"


def test_ctrl_c_cancels_the_request_and_exits_130(serving):
    serving.inference.left.clear()
    command = [*MAIN, "generate", "--target", serving.target, "--max-tokens", "1", "hang"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            assert process.stdout.read(3).decode() == "é0"
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 130
        finally:
            process.kill()
    assert serving.inference.left.wait(10)


@pytest.mark.parametrize(
    ("arguments", "stdin", "field"),
    [
        (("-",), b"\xff\xfe", "prompt"),
        (("--tokens", "-"), b"[1, true]", "tokens[1]"),
        (("--tokens", "-"), b"1 2 x", "tokens"),
        (("--tokens", "/nowhere/ids"), b"", "tokens"),
        (("--max-tokens", str(1 << 80), "x"), b"", "max_tokens"),
        (("--seed", "-1", "x"), b"", "sampling.seed"),
    ],
)
def test_what_cannot_be_sent_names_the_field(serving, arguments, stdin, field):
    done = kvrelay("generate", "--target", serving.target, "--json", *arguments, stdin=stdin)
    assert (done.returncode, done.stdout) == (1, b"")
    assert json.loads(done.stderr)["error"]["field"] == field


def test_nobody_at_the_target_is_one_clear_line():
    done = kvrelay("status", "--target", "127.0.0.1:1")
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr == b"kvrelay: cannot reach 127.0.0.1:1: Connection refused\n"


def test_a_target_without_a_port_is_refused_by_name():
    done = kvrelay("status", "--target", "nowhere")
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr == b"kvrelay: target must be HOST:PORT, not 'nowhere'\n"


def test_status_as_json_has_the_blocks_of_every_worker(serving):
    done = kvrelay("status", "--target", serving.target, "--json")
    worker = json.loads(done.stdout)["workers"][0]
    assert worker["blocks"] == {"total": 8, "free": 5, "held": 1, "cached": 1, "reserved": 1, "quarantined": 0}
    assert (worker["id"], worker["role"], worker["incarnation"], worker["pid"]) == ("d1", "decode", "i", 7)
    assert (worker["running"], worker["waiting"], worker["transfers_in_flight"], worker["tokens_per_s"]) == (
        2,
        1,
        3,
        4.5,
    )
    assert json.loads(done.stdout)["counters"] == {"migrated": 3}


def test_status_for_people_names_what_was_counted_and_is_not_zero(serving):
    table = kvrelay("status", "--target", serving.target).stdout.decode()
    assert "3 moved to other workers so far" in table
    assert "drains, bad_checksum 1, quarantined 2" in " ".join(table.split())
    assert "forced" not in table


@pytest.mark.parametrize("loop", [("--concurrency", "2"), ("--rate", "200")])
def test_bench_counts_every_request_and_token(serving, loop):
    serving.inference.requests.clear()
    sizes = ("--requests", "5", "--prompt-tokens", "6", "--output-tokens", "4", "--warmup", "1")
    done = kvrelay("bench", "--target", serving.target, "--json", "-", *loop, *sizes)
    figures = json.loads(done.stdout)
    assert (done.returncode, figures["requests"], figures["errors"]) == (0, 5, 0)
    assert figures["tbt_ms"]["max"] >= figures["tbt_ms"]["p50"] > 0
    assert figures["exposed_hand_off_ms_p50"] == 250.0
    prompts = {tuple(request.tokens.ids) for request in serving.inference.requests}
    assert len(prompts) == 6
    assert all(len(prompt) == 6 and max(prompt) < 9 for prompt in prompts)
    assert all(request.ignore_eos for request in serving.inference.requests)
    assert sorted(request.max_tokens for request in serving.inference.requests) == [4, 4, 4, 4, 4, 8]  # one to warm up
