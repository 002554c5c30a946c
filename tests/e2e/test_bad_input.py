"""Everything a client or an operator may get wrong: a clear error that names it, nothing lost, neighbours untouched."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from support.cluster import Cluster
from support.streams import answer_of, assert_exact, case_of, neighbour
from support.tiny_llama import random_llama

from kvrelay.client import AsyncClient
from kvrelay.errors import InvalidArgument, KVRelayError, NotFound, ResourceExhausted, Unimplemented
from kvrelay.models.builtin import BUILTIN_VOCAB
from kvrelay.rpc.channel import open_channel
from kvrelay.rpc.status import from_rpc_error
from kvrelay.v1 import inference_pb2

pytestmark = pytest.mark.e2e

GENERATE = "/kvrelay.v1.InferenceService/Generate"
LIMIT = 1024
"""Of the shared cluster: 64 blocks of 16 tokens."""
BESIDE = case_of(50, 900, seed=1)
GOOD: dict[str, Any] = {"prompt": [1, 2, 3], "max_tokens": 4}


@dataclass(frozen=True)
class Bad:
    """changes: what is wrong with an otherwise good request. named: the field its error must name."""

    name: str
    changes: dict[str, Any]
    named: str
    error: type[KVRelayError] = InvalidArgument
    said: tuple[str, ...] = field(default=())


CASES = [
    Bad("empty text", {"prompt": ""}, "text"),
    Bad("empty tokens", {"prompt": []}, "tokens.ids"),
    Bad("prompt of L", {"prompt": [5] * LIMIT, "max_tokens": 1}, "tokens.ids", said=("1024", "1023")),
    Bad("prompt of L+1", {"prompt": [5] * (LIMIT + 1), "max_tokens": 1}, "tokens.ids", said=("1025", "1023")),
    Bad("text of L", {"prompt": "a" * LIMIT, "max_tokens": 1}, "text", said=("1024", "1023")),
    *(
        Bad(f"max_tokens {n}", {"max_tokens": n}, "max_tokens", said=(str(n),))
        for n in (0, -1, LIMIT, LIMIT * 10, 2**31 - 1, 2**63 - 1, -(2**63))
    ),
    *(
        Bad(f"token id {i}", {"prompt": [1, i, 2]}, "tokens.ids[1]", said=(str(i),))
        for i in (-1, BUILTIN_VOCAB, BUILTIN_VOCAB + 1, 2**31, 2**63 - 1, -(2**63))
    ),
    *(Bad(f"temperature {t}", {"temperature": t}, "sampling.temperature") for t in (math.nan, math.inf, -math.inf, -1)),
    *(Bad(f"top_p {p}", {"top_p": p}, "sampling.top_p") for p in (0.0, -0.5, 1.0001, math.nan, math.inf)),
    *(Bad(f"top_k {k}", {"top_k": k}, "sampling.top_k") for k in (-1, -2)),
    Bad("empty stop string", {"stop": ["a", ""]}, "stop[1]"),
    Bad("too many stop strings", {"stop": [f"stop {i}" for i in range(17)]}, "stop", said=("16", "17")),
    Bad("very many stop strings", {"stop": [f"stop {i}" for i in range(100_000)]}, "stop", said=("16",)),
    Bad("too long stop string", {"stop": ["x" * 257]}, "stop[0]", said=("256", "257")),
    Bad("huge stop string", {"stop": ["x" * 1_000_000]}, "stop[0]", said=("256",)),
    Bad("stop token outside the vocabulary", {"stop_token_ids": [3, BUILTIN_VOCAB]}, "stop_token_ids[1]"),
    Bad("negative stop token", {"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    Bad("too many stop tokens", {"stop_token_ids": [1] * 257}, "stop_token_ids"),
    *(Bad(f"min_p {p}", {"min_p": p}, "sampling.min_p") for p in (-0.1, 1.5, math.nan)),
    *(Bad(f"repetition {r}", {"repetition_penalty": r}, "sampling.repetition_penalty") for r in (0.0, -1.0, math.inf)),
    *(Bad(f"bias of {i}", {"logit_bias": {i: 1.0}}, f"sampling.logit_bias[{i}]") for i in (-1, BUILTIN_VOCAB, 2**40)),
    *(Bad(f"bias {b}", {"logit_bias": {7: b}}, "sampling.logit_bias[7]") for b in (math.nan, math.inf, 1e38)),
    Bad("very many biases", {"logit_bias": dict.fromkeys(range(100_000), 1.0)}, "sampling.logit_bias", said=("1024",)),
    *(Bad(f"logprobs {n}", {"logprobs": n}, "sampling.logprobs", said=("20",)) for n in (-1, BUILTIN_VOCAB, 10**9)),
    *(Bad(f"min_tokens {n}", {"min_tokens": n}, "min_tokens") for n in (-1, 5)),
    Bad("nothing left of the prompt", {"truncate_prompt": 0}, "truncate_prompt"),
    Bad("a regex that is none", {"regex": "("}, "regex"),
    Bad("a constraint without an end", {"regex": "a", "ignore_eos": True}, "ignore_eos"),
    Bad("unknown model", {"model": "no-such-model"}, "model", NotFound, ("no-such-model", "hash")),
    Bad("chat without a template", {"prompt": [{"role": "user", "content": "hi"}]}, "chat"),
]


@pytest.mark.parametrize("bad", CASES, ids=lambda bad: bad.name)
async def test_a_bad_field_is_refused_by_name(hash_cluster: Cluster, bad: Bad) -> None:
    options = {**GOOD, **bad.changes}
    async with AsyncClient(hash_cluster.target) as client:
        with pytest.raises(bad.error) as raised:
            await client.generate(options.pop("prompt"), deadline_s=5.0, **options).collect()
    assert raised.value.field == bad.named
    for part in (bad.named, *bad.said):
        assert part in raised.value.message
    assert len(raised.value.message) < 300


async def test_neighbours_do_not_notice_bad_requests_and_nothing_is_held(hash_cluster: Cluster) -> None:
    """One long stream runs while every bad request is sent at once, three times over."""

    async def send(client: AsyncClient, bad: Bad) -> None:
        options = {**GOOD, **bad.changes}
        with pytest.raises(bad.error):
            await client.generate(options.pop("prompt"), deadline_s=20.0, **options).collect()

    async with neighbour(hash_cluster.target, BESIDE) as beside, AsyncClient(hash_cluster.target) as client:
        for _ in range(3):
            await asyncio.gather(*(send(client, bad) for bad in CASES))
    assert beside.answered
    hash_cluster.until_nothing_is_held()


async def test_the_longest_prompt_works_and_gives_one_token(hash_cluster: Cluster) -> None:
    case = case_of(LIMIT - 1, 1)
    async with AsyncClient(hash_cluster.target) as client:
        assert (await client.get_model()).context_limit == LIMIT
        for max_tokens in (1, None):
            result = await client.generate(
                list(case.prompt), max_tokens=max_tokens, temperature=0.0, ignore_eos=True
            ).collect()
            assert result.token_ids == answer_of(case)
            assert result.finish_reason == "length"
    hash_cluster.until_nothing_is_held()


async def test_a_prompt_and_output_that_fill_the_context_work(hash_cluster: Cluster) -> None:
    await assert_exact(hash_cluster.target, case_of(LIMIT - 2, 2))
    await assert_exact(hash_cluster.target, case_of(3, LIMIT - 3))
    hash_cluster.until_nothing_is_held()


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"temperature": 1e-30},
        {"temperature": 1e-5},
        {"temperature": 100.0},
        {"top_p": 1e-9},
        {"top_p": 1.0},
        {"top_k": 0},
        {"top_k": 1},
        {"top_k": 10**7},
        {"seed": 2**64 - 1},
        {"stop": ["x" * 256] * 16},
    ],
    ids=str,
)
async def test_values_at_the_edge_of_what_is_allowed_work(hash_cluster: Cluster, options: dict[str, Any]) -> None:
    async with AsyncClient(hash_cluster.target) as client:
        result = await client.generate([1, 2, 3], max_tokens=2, ignore_eos=True, **options).collect()
    assert len(result.token_ids) == 2
    assert all(0 <= t < BUILTIN_VOCAB for t in result.token_ids)


async def call_with_bytes(target: str, message: bytes, method: str = GENERATE) -> KVRelayError:
    """The error of a call whose request is any bytes at all."""
    async with open_channel(target) as channel:
        call = channel.unary_stream(method)(message, timeout=5.0)
        with pytest.raises(grpc.RpcError) as raised:
            async for _ in call:
                pass
    return from_rpc_error(raised.value)


@pytest.mark.parametrize(
    "message",
    [b"\x12\x03\xff\xfe\xfd", b"\x12\x03\xed\xa0\x80", b"\xff\xff\xff\xff", b"\x12\x7fshort", b"\x0a"],
    ids=["invalid UTF-8", "a surrogate", "no protobuf", "a length past the end", "cut off"],
)
async def test_bytes_that_are_no_request_are_an_invalid_argument(hash_cluster: Cluster, message: bytes) -> None:
    error = await call_with_bytes(hash_cluster.target, message)
    assert isinstance(error, InvalidArgument)
    assert error.field == "request"


async def test_a_request_without_a_prompt_is_refused(hash_cluster: Cluster) -> None:
    error = await call_with_bytes(hash_cluster.target, b"")
    assert isinstance(error, InvalidArgument)
    assert error.field == "prompt"


async def test_a_number_of_sequences_out_of_range_is_refused_by_name(hash_cluster: Cluster) -> None:
    for n in (17, 10**6, 0, -1):
        request = inference_pb2.GenerateRequest(text="a", n=n)
        error = await call_with_bytes(hash_cluster.target, request.SerializeToString())
        assert type(error) is InvalidArgument
        assert error.field == "n"


async def test_unknown_fields_and_values_of_a_newer_client_do_no_harm(hash_cluster: Cluster) -> None:
    request = inference_pb2.GenerateRequest(text="a", max_tokens=1, ignore_eos=True).SerializeToString()
    async with open_channel(hash_cluster.target) as channel:
        call = channel.unary_stream(GENERATE, response_deserializer=inference_pb2.GenerateResponse.FromString)
        messages = [m async for m in call(request + b"\xfa\x3e\x03abc", timeout=5.0)]
    assert [m.WhichOneof("event") for m in messages] == ["accepted", "token", "finished"]


async def test_a_message_over_the_size_limit_is_refused_and_the_channel_goes_on(hash_cluster: Cluster) -> None:
    async with AsyncClient(hash_cluster.target) as client:
        limit = (await client.get_model()).max_request_bytes
        with pytest.raises(ResourceExhausted):
            await client.generate("a" * (limit + 1_000_000), max_tokens=1, deadline_s=20.0).collect()
        with pytest.raises(InvalidArgument) as raised:  # a long message that is not over it is read
            await client.generate("a" * (limit - 1000), max_tokens=1, deadline_s=20.0).collect()
        assert raised.value.field == "text"
        assert len((await client.generate([1], max_tokens=1, ignore_eos=True).collect()).token_ids) == 1


async def test_a_method_that_does_not_exist_is_unimplemented(hash_cluster: Cluster) -> None:
    for method in ("/kvrelay.v1.InferenceService/NoSuch", "/kvrelay.v9.NoService/Generate"):
        assert isinstance(await call_with_bytes(hash_cluster.target, b"", method), Unimplemented)


async def test_health_and_reflection_answer(hash_cluster: Cluster) -> None:
    async with open_channel(hash_cluster.target) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("", "kvrelay.v1.InferenceService", "kvrelay.v1.ModelService"):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=service), timeout=5.0)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        stream = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([ask]))
        listed = [s.name async for m in stream for s in m.list_services_response.service]
    assert {"kvrelay.v1.InferenceService", "kvrelay.v1.ModelService", "kvrelay.v1.AdminService"} <= set(listed)


# what an operator may get wrong


def outcome(*argv: str, within_s: float = 30.0) -> tuple[int, str]:
    """(exit code, stderr) of a command that is to end by itself; stdout must stay empty but for a worker's ready."""
    command = [sys.executable, "-m", "kvrelay.cli.main", *argv]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=within_s, check=False)
    assert all(line.startswith("ready ") for line in ended.stdout.splitlines())
    return ended.returncode, ended.stderr


def assert_ends(code: int, *said: str, argv: list[str]) -> None:
    """The command ends so and one line of its stderr says all of it; no traceback."""
    got, stderr = outcome(*argv)
    assert "Traceback" not in stderr, stderr
    assert any(all(part in line for part in said) for line in stderr.splitlines()), stderr
    assert got == code, stderr


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--block-size", "32"), ("block_size", "16", "32")),
        (("--transport", "nixl"), ("transport", "grpc", "nixl")),
        (("--executor", "scripted"), ("executor", "hash", "scripted")),
    ],
    ids=["block size", "transport", "executor"],
)
def test_a_worker_that_does_not_pair_is_refused_with_field_and_both_values(
    hash_cluster: Cluster, tmp_path: Path, flags: tuple[str, ...], said: tuple[str, ...]
) -> None:
    script = tmp_path / "script.json"
    script.write_text("[1]")
    common = ["--coordinator", hash_cluster.target, "--executor", "hash", "--transport", "grpc", "--num-blocks", "64"]
    before = [w["id"] for w in hash_cluster.topology()]
    assert_ends(78, *said, argv=["decode", *common, "--script", str(script), *flags])
    assert [w["id"] for w in hash_cluster.topology()] == before


@pytest.fixture(scope="module")
def taken() -> Iterator[str]:
    """An address that somebody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_a_port_in_use_is_named(taken: str) -> None:
    hash_model = ["--executor", "hash"]
    assert_ends(1, taken, "in use", argv=["up", *hash_model, "--listen", taken])
    assert_ends(1, taken, "in use", argv=["coordinator", *hash_model, "--listen", taken])
    assert_ends(1, taken, "in use", argv=["decode", *hash_model, "--transport", "grpc", "--listen", taken])


def test_an_unknown_key_of_the_configuration_is_named(tmp_path: Path) -> None:
    config = tmp_path / "kvrelay.toml"
    config.write_text("[worker]\nblock_sise = 16\n")
    for argv in (["up"], ["prefill"], ["decode"], ["coordinator"]):
        assert_ends(78, "worker.block_sise", "block_size", argv=[*argv, "--config", str(config)])


def no_model(directory: Path) -> Path:
    return directory / "nothing-here"


def half_downloaded(directory: Path) -> Path:
    """Two shards are listed, one is there."""
    model = random_llama(directory / "half")
    weights = json.dumps({"metadata": {}, "weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}})
    (model / "model.safetensors.index.json").write_text(weights)
    (model / "model.safetensors").rename(model / "model-1.safetensors")
    return model


def cut_off(directory: Path) -> Path:
    """The weights end in the middle, as a download that broke leaves them."""
    model = random_llama(directory / "cut")
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    return model


def without_tokenizer(directory: Path) -> Path:
    model = random_llama(directory / "mute")
    (model / "tokenizer.json").unlink()
    return model


def of_another_architecture(directory: Path) -> Path:
    model = random_llama(directory / "other")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "architectures": ["MambaForCausalLM"]}))
    return model


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (no_model, ("nothing-here",)),
        (half_downloaded, ("model-2.safetensors",)),
        (cut_off, ("model.safetensors",)),
        (without_tokenizer, ("tokenizer.json",)),
        (of_another_architecture, ("MambaForCausalLM",)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_model_directory_that_cannot_be_served_ends_up_with_one_clear_line(
    tmp_path: Path, make: Any, said: tuple[str, ...]
) -> None:
    model = make(tmp_path)
    command = "coordinator" if make is without_tokenizer else "up"
    assert_ends(78, *said, argv=[command, "--model", str(model), "--listen", "127.0.0.1:0"])
