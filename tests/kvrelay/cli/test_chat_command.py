"""`kvrelay chat` as a process, through a pipe and on a terminal, against a small server in this one."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from support.cluster import process_state, until
from support.served import Served

from kvrelay import errors
from kvrelay.v1 import common_pb2, inference_pb2_grpc, model_pb2, model_pb2_grpc
from kvrelay.v1 import inference_pb2 as pb

MAIN = (sys.executable, "-m", "kvrelay.cli.main")


class Inference(inference_pb2_grpc.InferenceServiceServicer):
    """Answers with what was said last; some of it asks for trouble."""

    def __init__(self) -> None:
        self.requests: list[pb.GenerateRequest] = []
        self.left = threading.Event()

    async def Generate(self, request, context):
        self.requests.append(request)
        said = request.chat.messages[-1].content
        if said == "refuse":
            raise errors.ResourceExhausted("full", retry_after_s=0.5)
        yield pb.GenerateResponse(accepted=pb.Accepted(request_id="r1", prompt_tokens=3, seed=7, model="m"))
        yield pb.GenerateResponse(token=pb.Token(index=0, token_id=1, text=f"<{said}"))
        if said == "hang":
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                self.left.set()
                raise
        usage = pb.Usage(prompt_tokens=3, completion_tokens=1)
        finished = pb.Finished(
            reason=common_pb2.FINISH_REASON_STOP, text=">", usage=usage, prefill_worker="p", decode_worker="d"
        )
        yield pb.GenerateResponse(finished=finished)


class Models(model_pb2_grpc.ModelServiceServicer):
    async def GetModel(self, request, context):
        identity = common_pb2.ModelIdentity(model_id="m", vocab_size=9)
        return model_pb2.GetModelResponse(identity=identity, context_limit=64, chat_template=request.model != "mute")


@pytest.fixture(scope="module")
def serving() -> Iterator[Served]:
    served = Served(Inference(), Models())
    yield served
    served.close()


ENVIRONMENT = {key: value for key, value in os.environ.items() if not key.startswith("KVRELAY_")}


def chat(serving: Served, stdin: bytes, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    command = [*MAIN, "chat", "--target", serving.target, *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, timeout=60, check=False, env=ENVIRONMENT)


def test_a_piped_conversation_answers_a_turn_a_line(serving):
    done = chat(serving, b"eins\nzw\\\nei\n", "--system", "kurz", "--min-p", "0.5", "--stop", "x")
    assert (done.returncode, done.stdout.decode()) == (0, "<eins>\n<zw\nei>\n")
    assert [line.split(" · ")[0] for line in done.stderr.decode().splitlines()] == ["1 token", "1 token"]
    request = serving.inference.requests[-1]
    assert [(m.role, m.content) for m in request.chat.messages] == [
        ("system", "kurz"),
        ("user", "eins"),
        ("assistant", "<eins>"),
        ("user", "zw\nei"),
    ]
    assert (request.max_tokens, request.sampling.min_p, list(request.stop)) == (32, 0.5, ["x"])


def test_json_is_an_object_a_turn_and_errors_are_objects_on_stderr(serving):
    done = chat(serving, b"one\nrefuse\n/sing\ntwo\n", "--json", "--max-tokens", "5")
    assert done.returncode == 1
    turns = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(t["turn"], t["text"], t["finish_reason"]) for t in turns] == [(1, "<one>", "stop"), (2, "<two>", "stop")]
    codes = [json.loads(line)["error"]["code"] for line in done.stderr.splitlines()]
    assert codes == ["RESOURCE_EXHAUSTED", "NOT_FOUND"]
    assert serving.inference.requests[-1].max_tokens == 5


def test_bytes_that_are_no_text_cost_their_turn_alone(serving):
    done = chat(serving, b"\xff\none\n")
    assert (done.returncode, done.stdout) == (1, b"<one>\n")
    assert b"chat.messages[0].content cannot be sent" in done.stderr


def test_a_model_without_a_template_and_a_server_that_is_not_there_are_told_at_once(serving):
    done = chat(serving, b"hi\n", "--model", "mute", "--json")
    assert (done.returncode, done.stdout) == (1, b"")
    assert json.loads(done.stderr)["error"]["code"] == "FAILED_PRECONDITION"
    command = [*MAIN, "chat", "--target", "127.0.0.1:9"]
    done = subprocess.run(command, input=b"hi\n", capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr.count(b"\n")) == (1, b"", 1)


def test_ctrl_c_ends_the_answer_that_is_coming_and_no_more(serving):
    serving.inference.left.clear()
    command = [*MAIN, "chat", "--target", serving.target]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=ENVIRONMENT) as process:
        try:
            process.stdin.write(b"hang\n")
            process.stdin.flush()
            assert process.stdout.read(5) == b"<hang"
            process.send_signal(signal.SIGINT)
            assert serving.inference.left.wait(10)
            out, err = process.communicate(b"next\n", timeout=20)
        finally:
            process.kill()
    assert (process.returncode, out) == (0, b"\n<next>\n")
    assert err.decode().startswith("cancelled; what came of it stays in the conversation\n")
    messages = serving.inference.requests[-1].chat.messages
    assert [m.content for m in messages] == ["hang", "<hang", "next"]


class Terminal:
    """A process with a terminal as all its ends."""

    def __init__(self, *command: str) -> None:
        self.end, inner = pty.openpty()
        environment = {**ENVIRONMENT, "TERM": "dumb"}
        self.process = subprocess.Popen(
            command, stdin=inner, stdout=inner, stderr=inner, env=environment, start_new_session=True
        )
        os.close(inner)
        self.seen = ""

    def until(self, text: str, seconds: float = 30.0) -> str:
        """Reads until the text came; what was read until then is taken away."""
        ends_at = time.monotonic() + seconds
        while text not in self.seen:
            readable, _, _ = select.select([self.end], [], [], max(0.0, ends_at - time.monotonic()))
            assert readable, f"{text!r} did not come: {self.seen!r}"
            self.seen += os.read(self.end, 4096).decode()
        before, _, self.seen = self.seen.partition(text)
        return before

    def type(self, text: str) -> None:
        os.write(self.end, text.encode())

    def close(self) -> None:
        self.process.kill()
        self.process.wait(5)
        os.close(self.end)


@pytest.fixture
def terminal(serving) -> Iterator[Terminal]:
    terminal = Terminal(*MAIN, "chat", "--target", serving.target)
    yield terminal
    terminal.close()


def test_on_a_terminal_lines_are_prompted_for_and_what_was_typed_comes_back_with_an_arrow(serving, terminal):
    terminal.until("context of 64 tokens")
    terminal.until("> ")
    terminal.type("one\\\r")
    terminal.until(". ")
    terminal.type("more\r")
    terminal.until("<one")
    terminal.until("\x1b[2m1 token")
    terminal.until("p -> d\x1b[0m")
    terminal.until("> ")
    terminal.type("/undo\r")
    terminal.until("taken back: one more")
    terminal.until("> ")
    terminal.type("\x1b[A\x1b[A\r")
    terminal.until("<more")
    assert [m.content for m in serving.inference.requests[-1].chat.messages] == ["more"]
    terminal.until("p -> d\x1b[0m")
    terminal.until("> ")
    terminal.type("\x04")
    assert terminal.process.wait(20) == 0


def test_ctrl_c_at_the_prompt_leaves(terminal):
    terminal.until("> ")
    pid = terminal.process.pid
    until(lambda: process_state(pid) == "S", 10.0, "it reads")  # between prompt and read a signal waits for a key
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.process.wait(20) == 0
