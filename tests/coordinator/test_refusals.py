"""Every way to be refused over gRPC, and the details that a program may rely on (docs/errors.md), read as bytes."""

from __future__ import annotations

import asyncio
import dataclasses
from dataclasses import dataclass, replace
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from support.door import Door, until
from support.fake_workers import FakeWorker

from kvrelay.errors import RETRY_S
from kvrelay.requests import RequestId, Role
from kvrelay.rpc.convert import description_to_proto
from kvrelay.session import Refused
from kvrelay.telemetry.calls import LABEL_HEADER, MAX_LABEL_BYTES, OWN_HEADER
from kvrelay.v1 import admin_pb2, inference_pb2, model_pb2, registry_pb2

GENERATE, TOKENIZE, DETOKENIZE = (f"kvrelay.v1.InferenceService/{m}" for m in ("Generate", "Tokenize", "Detokenize"))
GET_MODEL = "kvrelay.v1.ModelService/GetModel"
DRAIN = "kvrelay.v1.AdminService/DrainWorker"
ANNOUNCE = "kvrelay.v1.RegistryService/Announce"
KINDS = (
    error_details_pb2.ErrorInfo,
    error_details_pb2.BadRequest,
    error_details_pb2.ResourceInfo,
    error_details_pb2.RetryInfo,
)


@dataclass(frozen=True)
class Said:
    """What a refusal said. reason and domain: of ErrorInfo; field, resource, retry_s: of the details that say them."""

    code: str
    reason: str = ""
    field: str = ""
    retry_s: float | None = None
    resource: tuple[str, str] | None = None
    metadata: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True)
class Way:
    name: str
    method: str
    request: Message | bytes
    said: Said
    headers: tuple[tuple[str, str], ...] = ()


def wrong(named: str) -> Said:
    return Said("INVALID_ARGUMENT", "InvalidArgument", named)


def missing(kind: str, name: str, named: str) -> Said:
    return Said("NOT_FOUND", "NotFound", named, resource=(kind, name))


def generate(**fields: Any) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(**{"text": "a", "max_tokens": 2, **fields})


def sampled(**fields: Any) -> inference_pb2.GenerateRequest:
    return generate(sampling=fields)


LONG = missing("worker", "w" * 253 + "...", "worker_id")
ALWAYS = [
    Way("no protobuf", GENERATE, b"\xff\xff\xff", wrong("request")),
    Way("no UTF-8", GENERATE, b"\x12\x03\xff\xfe\xfd", wrong("request")),
    Way("no UTF-8 in a unary call", TOKENIZE, b"\x12\x03\xff\xfe\xfd", wrong("request")),
    Way("nothing", GENERATE, b"", wrong("prompt")),
    Way("empty text", GENERATE, generate(text=""), wrong("text")),
    Way("a token outside", GENERATE, generate(tokens={"ids": [1, 999]}), wrong("tokens.ids[1]")),
    Way("temperature", GENERATE, sampled(temperature=-1.0), wrong("sampling.temperature")),
    Way("top_p", GENERATE, sampled(top_p=0.0), wrong("sampling.top_p")),
    Way("max_tokens", GENERATE, generate(max_tokens=0), wrong("max_tokens")),
    Way("n", GENERATE, generate(n=17), wrong("n")),
    Way("stop", GENERATE, generate(stop=["a", ""]), wrong("stop[1]")),
    Way("label in the request", GENERATE, generate(client_request_id="x" * 257), wrong("client_request_id")),
    Way("label in a header", GENERATE, generate(), wrong(LABEL_HEADER), ((LABEL_HEADER, "x" * 257),)),
    Way("model", GENERATE, generate(model="other"), missing("model", "other", "model")),
    Way("model to tokenize", TOKENIZE, inference_pb2.TokenizeRequest(model="m"), missing("model", "m", "model")),
    Way("model to detokenize", DETOKENIZE, inference_pb2.DetokenizeRequest(model="m"), missing("model", "m", "model")),
    Way("a token to detokenize", DETOKENIZE, inference_pb2.DetokenizeRequest(token_ids=[-1]), wrong("token_ids[0]")),
    Way("model to describe", GET_MODEL, model_pb2.GetModelRequest(model="x"), missing("model", "x", "model")),
    Way("worker", DRAIN, admin_pb2.DrainWorkerRequest(worker_id="w9"), missing("worker", "w9", "worker_id")),
    Way("long name of a worker", DRAIN, admin_pb2.DrainWorkerRequest(worker_id="w" * 100_000), LONG),
    Way("long name of a model", GENERATE, generate(model="w" * 100_000), missing("model", "w" * 253 + "...", "model")),
    Way("grace", DRAIN, admin_pb2.DrainWorkerRequest(worker_id="p0", grace_s=-1.0), wrong("grace_s")),
    Way("method", "kvrelay.v1.InferenceService/NoSuch", b"", Said("UNIMPLEMENTED", "Unimplemented")),
    Way("service", "kvrelay.v9.NoService/Generate", b"\xff", Said("UNIMPLEMENTED", "Unimplemented")),
    Way("too large", GENERATE, generate(text="a" * 9_000_000), Said("RESOURCE_EXHAUSTED")),
]
ANY = Said("")
NO_WORKER = Said("UNAVAILABLE", "Unavailable", retry_s=1.0)
FULL = Said("RESOURCE_EXHAUSTED", "ResourceExhausted", retry_s=1.0, metadata={"limit": "open_limit", "most": "1"})


async def refusal(door: Door, way: Way, timeout: float | None = None) -> tuple[Said, dict[str, str]]:
    """What was said, and the text of the trailing metadata."""
    raw = way.request if isinstance(way.request, bytes) else way.request.SerializeToString()
    call = door.channel.unary_stream(f"/{way.method}")(raw, timeout=timeout, metadata=way.headers)
    with pytest.raises(grpc.RpcError) as raised:
        async for _ in call:
            pass
    error = raised.value
    assert isinstance(error, grpc.aio.AioRpcError)
    trailers = {key: value for key, value in error.trailing_metadata() or () if isinstance(value, str)}
    return said_by(error), trailers


def said_by(error: grpc.aio.AioRpcError) -> Said:
    said, status = Said(error.code().name), rpc_status.from_call(error)
    for packed in status.details if status is not None else ():
        detail = next(kind() for kind in KINDS if packed.Is(kind.DESCRIPTOR))
        assert packed.Unpack(detail)
        match detail:
            case error_details_pb2.ErrorInfo():
                assert detail.domain == "kvrelay"
                said = replace(said, reason=detail.reason, metadata=dict(detail.metadata))
            case error_details_pb2.BadRequest():
                (violation,) = detail.field_violations
                assert violation.description == error.details()
                said = replace(said, field=violation.field)
            case error_details_pb2.ResourceInfo():
                assert detail.description == error.details()
                said = replace(said, resource=(detail.resource_type, detail.resource_name))
            case error_details_pb2.RetryInfo():
                said = replace(said, retry_s=detail.retry_delay.ToNanoseconds() / 1e9)
    return said


@pytest.mark.parametrize("way", ALWAYS, ids=lambda way: way.name)
async def test_what_is_wrong_with_a_call_is_told_in_words_for_programs(
    door: Door, pair: tuple[FakeWorker, FakeWorker], way: Way
) -> None:
    said, trailers = await refusal(door, way)
    assert said == way.said
    if said.reason:
        assert len(trailers[OWN_HEADER]) == 32
    after = await door.ask(text="a", max_tokens=2)
    assert after.ids == [97, 98], "the connection goes on"


async def test_without_a_worker_a_caller_hears_when_to_try_again(door: Door) -> None:
    assert (await refusal(door, Way("", GENERATE, generate(), ANY)))[0] == NO_WORKER


@pytest.mark.parametrize("door", [{"open_limit": 1}], indirect=True)
async def test_where_it_is_full_a_caller_hears_of_the_limit_and_when_to_try_again(
    door: Door, pair: tuple[FakeWorker, FakeWorker]
) -> None:
    pair[1].hold["reserve"] = asyncio.Event()
    _, held = door.begin(text="a", max_tokens=2)
    await until(lambda: door.coordinator.dispatcher.num_open == 1)
    said, trailers = await refusal(door, Way("", GENERATE, generate(), FULL, ((LABEL_HEADER, "mine"),)))
    assert said == FULL
    assert trailers[LABEL_HEADER] == "mine"
    assert len(trailers[OWN_HEADER]) == 32
    pair[1].let_go("reserve")
    assert (await held).ids == [97, 98]


async def test_while_draining_a_caller_hears_when_to_try_again(door: Door, pair: tuple[FakeWorker, FakeWorker]) -> None:
    door.coordinator.server.edge.draining = True
    for method in (GENERATE, TOKENIZE, GET_MODEL):
        assert (await refusal(door, Way("", method, b"", ANY)))[0] == Said("UNAVAILABLE", "Unavailable", retry_s=1.0)


async def test_the_worker_that_refuses_is_named(door: Door, pair: tuple[FakeWorker, FakeWorker]) -> None:
    pair[1].refuse = Refused(RequestId(""), 0, "FailedPrecondition", "it does not pair", "layout")
    said, _ = await refusal(door, Way("", GENERATE, generate(), ANY))
    assert said == Said("FAILED_PRECONDITION", "FailedPrecondition", "layout", metadata={"worker": "d0"})


async def test_attempts_used_up_may_be_tried_again_and_the_last_worker_is_named(
    door: Door, pair: tuple[FakeWorker, FakeWorker]
) -> None:
    pair[1].refuse = Refused(RequestId(""), 0, "Unavailable", "draining")
    said, _ = await refusal(door, Way("", GENERATE, generate(), ANY), timeout=20.0)
    assert said == Said("ABORTED", "Aborted", retry_s=RETRY_S, metadata={"worker": "d0"})


async def test_a_worker_s_nonsense_is_our_bug_and_nothing_is_told_of_it(
    door: Door, pair: tuple[FakeWorker, FakeWorker]
) -> None:
    pair[1].script = [97, 10**6]
    said, _ = await refusal(door, Way("", GENERATE, generate(max_tokens=3), ANY))
    assert said == Said("INTERNAL", "Internal")


async def test_a_worker_that_does_not_pair_is_told_the_field(door: Door, pair: tuple[FakeWorker, FakeWorker]) -> None:
    async with FakeWorker(Role.DECODE, "d1") as stranger:
        layout = replace(stranger.describe().layout, block_size=32)
        about = description_to_proto(stranger.describe(layout=layout))
        said, _ = await refusal(door, Way("", ANNOUNCE, registry_pb2.AnnounceRequest(description=about), ANY))
    assert (said.code, said.reason) == ("FAILED_PRECONDITION", "LayoutMismatch")
    assert "block_size" in said.field


def test_the_longest_label_is_what_the_documentation_says() -> None:
    assert MAX_LABEL_BYTES == 256
