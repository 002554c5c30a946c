"""Whose call it was: x-request-id and our own id come back whatever becomes of a call; traces go on, garbage not."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvrelay.errors import InvalidArgument, NotFound
from kvrelay.rpc.channel import open_channel
from kvrelay.rpc.interceptors import GENERATE, TracingInterceptor
from kvrelay.rpc.server import RpcServer
from kvrelay.rpc.status import from_rpc_error
from kvrelay.telemetry import calls, names
from kvrelay.telemetry.calls import LABEL_HEADER, OWN_HEADER
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import inference_pb2_grpc

TRACE = "0123456789abcdef0123456789abcdef"
PARENT = f"00-{TRACE}-0123456789abcdef-01"
LONGEST = "x" * 256


class Telling(inference_pb2_grpc.InferenceServiceServicer):
    """Answers with the id of its own call; fails where the text says so."""

    async def Generate(self, request: pb.GenerateRequest, context: object) -> AsyncIterator[pb.GenerateResponse]:
        ids = calls.current()
        assert ids is not None
        yield pb.GenerateResponse(accepted=pb.Accepted(request_id=ids.request_id))
        if request.text:
            raise NotFound("ordered")

    async def Tokenize(self, request: pb.TokenizeRequest, context: object) -> pb.TokenizeResponse:
        if request.text == "break":
            raise ValueError("a bug")
        if request.text:
            raise NotFound("ordered")
        return pb.TokenizeResponse()


class Served:
    def __init__(self, channel: grpc.aio.Channel, spans: InMemorySpanExporter) -> None:
        self.stub = inference_pb2_grpc.InferenceServiceStub(channel)
        self.spans = spans

    async def span(self) -> ReadableSpan:
        async with asyncio.timeout(5):
            while not self.spans.get_finished_spans():  # noqa: ASYNC110  # the exporter has no event
                await asyncio.sleep(0.005)
        (span,) = self.spans.get_finished_spans()
        return span


@asynccontextmanager
async def serving() -> AsyncIterator[Served]:
    spans, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(spans))
    server = RpcServer(interceptors=[TracingInterceptor(provider, [GENERATE])])
    server.add(inference_pb2_grpc.add_InferenceServiceServicer_to_server, Telling(), "kvrelay.v1.InferenceService")
    port = server.bind("127.0.0.1:0")
    await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        yield Served(channel, spans)
    await server.stop(0)


def texts(metadata: object) -> dict[str, str]:
    assert isinstance(metadata, grpc.aio.Metadata)
    return {key: value for key, value in metadata if isinstance(value, str)}


@pytest.mark.parametrize("label", ["", "mine", "a b,c;~=", LONGEST])
async def test_an_answer_begins_with_the_caller_s_label_and_our_id(label: str) -> None:
    headers = ((LABEL_HEADER, label),) if label else ()
    async with serving() as s:
        call = s.stub.Tokenize(pb.TokenizeRequest(), metadata=headers)
        await call
        told = texts(await call.initial_metadata())
        assert told.get(LABEL_HEADER, "") == label
        assert len(told[OWN_HEADER]) == 32
        again = s.stub.Tokenize(pb.TokenizeRequest(), metadata=headers)
        await again
        assert texts(await again.initial_metadata())[OWN_HEADER] != told[OWN_HEADER], "a label is no key"


@pytest.mark.parametrize("label", ["", "mine"])
async def test_a_refusal_ends_with_the_caller_s_label_and_our_id(label: str) -> None:
    headers = ((LABEL_HEADER, label),) if label else ()
    async with serving() as s:
        with pytest.raises(grpc.aio.AioRpcError) as unary:
            await s.stub.Tokenize(pb.TokenizeRequest(text="fail"), metadata=headers)
        stream = s.stub.Generate(pb.GenerateRequest(text="fail"), metadata=headers)
        own = (await stream.read()).accepted.request_id
        with pytest.raises(grpc.aio.AioRpcError) as streamed:
            await stream.read()
        assert texts(streamed.value.trailing_metadata())[OWN_HEADER] == own
        for error in (unary.value, streamed.value):
            assert texts(error.trailing_metadata()).get(LABEL_HEADER, "") == label
            assert isinstance(from_rpc_error(error), NotFound)


async def test_a_label_that_is_too_long_is_refused_by_name_and_does_not_come_back() -> None:
    async with serving() as s:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await s.stub.Tokenize(pb.TokenizeRequest(), metadata=((LABEL_HEADER, LONGEST + "x"),))
        error = from_rpc_error(raised.value)
        assert (type(error), error.field) == (InvalidArgument, LABEL_HEADER)
        assert set(texts(raised.value.trailing_metadata())) == {OWN_HEADER}


async def test_headers_too_large_for_the_library_are_refused_and_the_connection_goes_on() -> None:
    async with serving() as s:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await s.stub.Tokenize(pb.TokenizeRequest(), metadata=((LABEL_HEADER, "x" * 100_000),))
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await s.stub.Tokenize(pb.TokenizeRequest())


@pytest.mark.parametrize("text", ["", "fail"])
async def test_the_span_of_a_call_says_whose_it_was(text: str) -> None:
    async with serving() as s:
        call = s.stub.Generate(pb.GenerateRequest(text=text), metadata=((LABEL_HEADER, "mine"),))
        own = (await call.read()).accepted.request_id
        await call.code()
        attributes = (await s.span()).attributes
    assert attributes is not None
    assert (attributes[names.LABEL], attributes[names.REQUEST_ID]) == ("mine", own)


async def test_a_bug_is_logged_with_whose_call_it_was(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as s:
        with caplog.at_level(logging.ERROR), pytest.raises(grpc.aio.AioRpcError) as raised:
            await s.stub.Tokenize(pb.TokenizeRequest(text="break"), metadata=((LABEL_HEADER, "mine"),))
    own = texts(raised.value.trailing_metadata())[OWN_HEADER]
    assert f"unexpected exception request={own} label='mine'" in caplog.text


async def test_a_trace_goes_on_with_its_state() -> None:
    async with serving() as s:
        headers = (("traceparent", PARENT), ("tracestate", "rojo=00f067aa0ba902b7,congo=t61rcWkgMzE"))
        assert len([m async for m in s.stub.Generate(pb.GenerateRequest(), metadata=headers)]) == 1
        span = await s.span()
    assert f"{span.context.trace_id:032x}" == TRACE
    assert span.context.trace_state.to_header() == "rojo=00f067aa0ba902b7,congo=t61rcWkgMzE"


@pytest.mark.parametrize(
    "headers",
    [
        (("traceparent", "garbage"),),
        (("traceparent", PARENT[:-5]),),
        (("traceparent", PARENT.upper() + " and more"),),
        (("traceparent", f"ff-{TRACE}-0123456789abcdef-01"),),
        (("traceparent", "00-" + "0" * 32 + "-0123456789abcdef-01"),),
        (("traceparent", ""), ("tracestate", ",,=,")),
        (("traceparent", PARENT), ("tracestate", "=" * 600)),
        (("tracestate", "a=b"),),
        (("traceparent-bin", b"\xff\x00"),),
    ],
    ids=["words", "cut", "capitals", "version", "zeros", "empty", "broken state", "state alone", "bytes"],
)
async def test_a_broken_trace_context_costs_no_call(headers: tuple[tuple[str, str | bytes], ...]) -> None:
    async with serving() as s:
        assert len([m async for m in s.stub.Generate(pb.GenerateRequest(), metadata=headers)]) == 1
        span = await s.span()
    assert (f"{span.context.trace_id:032x}" == TRACE) is (headers[0] == ("traceparent", PARENT))
