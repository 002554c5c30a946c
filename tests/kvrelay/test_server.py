"""A real server on loopback: errors of handlers, garbage, drains, ports, health, sizes, spans."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from kvrelay import errors
from kvrelay.rpc.channel import open_channel
from kvrelay.rpc.interceptors import TracingInterceptor
from kvrelay.rpc.server import RpcServer, server_options
from kvrelay.rpc.status import STATUS_TABLE, from_rpc_error
from kvrelay.v1 import inference_pb2 as pb
from kvrelay.v1 import inference_pb2_grpc, worker_pb2, worker_pb2_grpc

INFERENCE = "kvrelay.v1.InferenceService"
GENERATE = f"/{INFERENCE}/Generate"


async def until(condition, seconds: float = 5.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110  # what is waited for has no event
            await asyncio.sleep(0.005)


class Servicer(inference_pb2_grpc.InferenceServiceServicer):
    """The prompt's text says what to do: `raise NAME AFTER`, `say COUNT`, `hang`, `abort`."""

    def __init__(self) -> None:
        self.ended: list[str] = []
        self.hanging = 0

    async def Generate(self, request, context):
        verb, *words = request.text.split()
        try:
            if verb == "raise":
                for index in range(int(words[1])):
                    yield pb.GenerateResponse(token=pb.Token(index=index))
                self.fail(words[0])
            elif verb == "abort":
                await context.abort(grpc.StatusCode.ABORTED, "by hand")
            elif verb == "hang":
                yield pb.GenerateResponse(token=pb.Token(index=0))
                self.hanging += 1
                await asyncio.Event().wait()
            elif verb == "flood":
                while True:
                    yield pb.GenerateResponse(token=pb.Token(text="x" * 100_000))
            for index in range(int(words[0])):
                yield pb.GenerateResponse(token=pb.Token(index=index))
                await asyncio.sleep(0)
        except BaseException as error:
            self.ended.append(type(error).__name__)
            raise

    def fail(self, name: str) -> None:
        if name == "ValueError":
            raise ValueError("the secret is swordfish")
        if name == "TimeoutError":
            raise TimeoutError
        raise getattr(errors, name)(f"{name} happened", field="a.b", retry_after_s=2.0)

    async def Tokenize(self, request, context):
        if request.text.startswith("raise"):
            self.fail(request.text.split()[1])
        return pb.TokenizeResponse(token_ids=[len(request.text)])

    async def Detokenize(self, request, context):
        return pb.DetokenizeResponse(text=trace.get_current_span().get_span_context().trace_id.to_bytes(16).hex())


class Sessions(worker_pb2_grpc.PrefillServiceServicer):
    """Echoes the sequence numbers of heartbeats: Session as an async generator, or with read and write."""

    def __init__(self, style: str) -> None:
        self.style = style
        self.seen: list[int] = []

    async def Describe(self, request, context):
        return worker_pb2.PrefillServiceDescribeResponse()

    def Session(self, request_iterator, context):
        return self.iterate(request_iterator) if self.style == "generator" else self.converse(context)

    async def iterate(self, request_iterator):
        async for message in request_iterator:
            yield self.answer(message)

    async def converse(self, context):
        while (message := await context.read()) is not grpc.aio.EOF:
            await context.write(self.answer(message))

    def answer(self, message):
        self.seen.append(message.command.heartbeat.seq)
        return worker_pb2.PrefillServiceSessionResponse(report=worker_pb2.Report(heartbeat_seq=self.seen[-1]))


class Running:
    def __init__(self, server: RpcServer, servicer: Servicer, channel: grpc.aio.Channel, address: str) -> None:
        self.server, self.servicer, self.channel, self.address = server, servicer, channel, address
        self.stub = inference_pb2_grpc.InferenceServiceStub(channel)

    def generate(self, text: str, **options):
        return self.stub.Generate(pb.GenerateRequest(text=text), **options)


@contextlib.asynccontextmanager
async def serving(interceptors=(), max_receive_bytes=1_000_000, sessions=None):
    server, servicer = RpcServer(interceptors=interceptors, max_receive_bytes=max_receive_bytes), Servicer()
    server.add(inference_pb2_grpc.add_InferenceServiceServicer_to_server, servicer, INFERENCE)
    if sessions is not None:
        server.add(worker_pb2_grpc.add_PrefillServiceServicer_to_server, sessions, "kvrelay.v1.PrefillService")
    address = f"127.0.0.1:{server.bind('127.0.0.1:0')}"
    await server.start()
    async with open_channel(address) as channel:
        try:
            yield Running(server, servicer, channel, address)
        finally:
            await server.stop(0)


async def failure(call) -> tuple[int, errors.KVRelayError]:
    """Messages received and the error, which must come within a second."""
    count = 0
    try:
        async with asyncio.timeout(1):
            async for _ in call:
                count += 1
    except grpc.RpcError as error:
        return count, from_rpc_error(error)
    raise AssertionError(f"no error after {count} messages")


async def test_every_error_reaches_a_stream_s_caller_after_any_number_of_messages():
    async with serving() as s:
        for kind in STATUS_TABLE:
            for after in (0, 1, 5):
                count, error = await failure(s.generate(f"raise {kind.__name__} {after}"))
                assert (count, type(error), error.field, error.retry_after_s) == (after, kind, "a.b", 2.0)
        for name in ("ValueError", "TimeoutError"):
            count, error = await failure(s.generate(f"raise {name} 1"))
            assert (count, type(error)) == (1, errors.Internal)
            assert "swordfish" not in error.message
        count, error = await failure(s.generate("abort"))
        assert (count, type(error), error.message) == (0, errors.Aborted, "by hand")
        await until(lambda: s.server.edge.running == 0)


async def test_every_error_reaches_a_unary_caller():
    async with serving() as s:
        for kind in STATUS_TABLE:
            with pytest.raises(grpc.RpcError) as caught:
                await s.stub.Tokenize(pb.TokenizeRequest(text=f"raise {kind.__name__}"))
            assert type(from_rpc_error(caught.value)) is kind
        assert (await s.stub.Tokenize(pb.TokenizeRequest(text="four"))).token_ids == [4]


@pytest.mark.parametrize("garbage", [b"\xff\xff\xff", b"\x12\x02\xff\xfe", b"\x12\x50ab", b"\x0a\x01\x80"])
async def test_what_is_no_message_or_no_utf8_is_refused_and_the_connection_goes_on(garbage):
    async with serving() as s:
        call = s.channel.unary_stream(GENERATE)(garbage)
        count, error = await failure(call)
        assert (count, type(error), error.field) == (0, errors.InvalidArgument, "request")
        with pytest.raises(grpc.RpcError) as caught:
            await s.channel.unary_unary(f"/{INFERENCE}/Tokenize")(garbage)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert len([m async for m in s.generate("say 3")]) == 3


@pytest.mark.parametrize("style", ["generator", "conversation"])
async def test_garbage_inside_a_request_stream_ends_it_with_invalid_argument(style):
    sessions = Sessions(style)
    async with serving(sessions=sessions) as s:
        good = worker_pb2.PrefillServiceSessionRequest(
            command=worker_pb2.Command(heartbeat=worker_pb2.Heartbeat(seq=7))
        )
        call = s.channel.stream_stream("/kvrelay.v1.PrefillService/Session")()
        await call.write(good.SerializeToString())
        assert worker_pb2.PrefillServiceSessionResponse.FromString(await call.read()).report.heartbeat_seq == 7
        await call.write(b"\xff\xff")
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert sessions.seen == [7]
        stub = worker_pb2_grpc.PrefillServiceStub(s.channel)
        again = stub.Session()
        await again.write(good)
        assert (await again.read()).report.heartbeat_seq == 7
        await again.done_writing()
        assert await again.code() is grpc.StatusCode.OK


async def test_a_client_that_leaves_ends_its_handler_at_once_wherever_it_is():
    gc.disable()
    try:
        async with serving() as s:
            call = s.generate("hang")
            await call.read()
            await until(lambda: s.servicer.hanging == 1)
            call.cancel()
            await until(lambda: s.servicer.ended == ["CancelledError"])
            flood = s.generate("flood")
            await flood.read()
            flood.cancel()
            await until(lambda: len(s.servicer.ended) == 2)
            assert s.servicer.ended[1] in ("CancelledError", "GeneratorExit")
            await until(lambda: s.server.edge.running == 0)
    finally:
        gc.enable()


async def test_a_deadline_ends_the_handler():
    async with serving() as s:
        started = time.monotonic()
        count, error = await failure(s.generate("hang", timeout=0.2))
        assert (count, type(error)) == (1, errors.DeadlineExceeded)
        await until(lambda: s.servicer.ended == ["CancelledError"])
        assert time.monotonic() - started < 1.0


async def test_a_message_over_the_limit_is_refused_and_the_connection_goes_on():
    async with serving(max_receive_bytes=1000) as s:
        count, error = await failure(s.generate("say 1 " + "x" * 1000))
        assert (count, type(error)) == (0, errors.ResourceExhausted)
        assert len([m async for m in s.generate("say 2")]) == 2


def test_without_keepalive_a_server_closes_no_connection_for_want_of_an_answer():
    pings = {"grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms"}
    assert pings <= {name for name, _ in server_options()}
    assert pings.isdisjoint(name for name, _ in server_options(keepalive=False))


async def test_a_port_in_use_is_an_error_that_names_the_address():
    async with serving() as s:
        other = RpcServer()
        with pytest.raises(
            errors.FailedPrecondition, match=f"cannot listen on {s.address}: Address already in use"
        ) as caught:
            other.bind(s.address)
        assert caught.value.field == "listen"


async def test_health_tells_liveness_and_readiness_apart_and_reflection_lists_the_services():
    async with serving() as s:
        health = health_pb2_grpc.HealthStub(s.channel)

        async def state(name: str) -> str:
            answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
            return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)

        assert [await state(""), await state(INFERENCE)] == ["SERVING", "NOT_SERVING"]
        await s.server.set_ready(True)
        assert await state(INFERENCE) == "SERVING"
        stub = reflection_pb2_grpc.ServerReflectionStub(s.channel)
        call = stub.ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        names = {service.name for service in (await call.read()).list_services_response.service}
        assert {INFERENCE, "grpc.health.v1.Health"} <= names
        call.cancel()


async def test_a_stop_lets_running_calls_end_refuses_new_ones_and_is_bounded():
    async with serving() as s:
        running = s.generate("hang")
        await running.read()
        await until(lambda: s.servicer.hanging == 1)
        started = time.monotonic()
        stopping = asyncio.create_task(s.server.stop(0.5))
        await until(lambda: s.server.edge.draining)
        _, refused = await failure(s.generate("say 1"))
        assert (type(refused), refused.retry_after_s) == (errors.Unavailable, 1.0)
        await stopping
        assert 0.4 < time.monotonic() - started < 1.5
        assert s.servicer.ended == ["CancelledError"]


async def test_one_call_that_ends_by_error_does_not_cut_others_short_while_stopping():
    async with serving() as s:
        streams = [aiter(s.generate("say 2000")) for _ in range(8)]
        for stream in streams:
            await anext(stream)
        failing = s.generate("raise NotFound 3")
        stopping = asyncio.create_task(s.server.stop(10))
        assert (await failure(failing))[0] in (0, 3)
        for stream in streams:
            assert len([m async for m in stream]) == 1999
        await asyncio.wait_for(stopping, 3)


PARENT = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"


@pytest.mark.parametrize(
    ("text", "status"),
    [("say 2", "OK"), ("raise NotFound 1", "NOT_FOUND"), ("raise ValueError 0", "INTERNAL"), ("hang", "CANCELLED")],
)
async def test_a_call_has_one_server_span_in_the_caller_s_trace_with_its_real_status(text, status):
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    async with serving(interceptors=[TracingInterceptor(provider)]) as s:
        call = s.generate(text, metadata=(("traceparent", PARENT),))
        if status == "CANCELLED":
            await call.read()
            await until(lambda: s.servicer.hanging == 1)
            call.cancel()
        else:
            with contextlib.suppress(grpc.RpcError):
                assert len([m async for m in call]) == 2
        await until(exporter.get_finished_spans)
        (span,) = exporter.get_finished_spans()
    assert span.name == "kvrelay.v1.InferenceService/Generate"
    assert span.kind is trace.SpanKind.SERVER
    assert f"{span.context.trace_id:032x}" == "0123456789abcdef0123456789abcdef"
    assert f"{span.parent.span_id:016x}" == "0123456789abcdef"
    assert span.attributes["rpc.status_code"] == status
    assert span.status.status_code is (StatusCode.UNSET if status == "OK" else StatusCode.ERROR)


async def test_the_span_is_current_inside_the_handler_and_nowhere_after():
    provider = TracerProvider(shutdown_on_exit=False)
    method = f"/{INFERENCE}/Detokenize"
    async with serving(interceptors=[TracingInterceptor(provider, [method])]) as s:
        answer = await s.stub.Detokenize(pb.DetokenizeRequest(), metadata=(("traceparent", PARENT),))
    assert answer.text == "0123456789abcdef0123456789abcdef"
    assert not trace.get_current_span().get_span_context().is_valid
