"""Ends of calls over the OpenAI door: hang-ups at any moment, readers that stop, a stop of the coordinator, traces."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from support.door import MODEL, Door, held, join, opened, until
from support.fake_workers import FakeWorker
from support.http_client import Wire, asked, small_window, wire_to
from support.http_door import HttpDoor

from coordinator.main import Coordinator
from kvrelay.config import CoordinatorConfig
from kvrelay.errors import ResourceExhausted
from kvrelay.requests import Role
from kvrelay.rpc.channel import open_channel
from kvrelay.session import Abort, Prefill, Reserve, Start
from kvrelay.telemetry.tracing import Tracing

Pair = tuple[FakeWorker, FakeWorker]
COMPLETIONS = "/v1/completions"


async def left_everything(http: HttpDoor) -> None:
    await http.grpc.idle()
    await asyncio.wait_for(http.server.door.wait_idle(), 5)


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("reset", [True, False])
@pytest.mark.parametrize(
    ("step", "at", "seen"),
    [("reserve", 1, Reserve), ("token0", 0, Prefill), ("landed", 0, Prefill), ("decode", 1, Start)],
)
async def test_a_hang_up_in_each_phase_ends_the_request_at_once(
    http: HttpDoor, pair: Pair, step: str, at: int, seen: type, reset: bool, streams: bool
) -> None:
    worker = pair[at]
    held(worker, step)
    async with wire_to(http.address) as wire:
        wire.ask(COMPLETIONS, {"prompt": "hello", "max_tokens": 50, "stream": streams})
        await until(lambda: worker.commands(seen))
        await wire.hang_up(reset=reset)
        await until(lambda: worker.commands(Abort), 2.0)
    await left_everything(http)
    worker.let_go(step)
    assert http.grpc.counters["outcome.Cancelled"] == 1


async def test_a_hang_up_inside_a_stream_ends_it(http: HttpDoor, pair: Pair) -> None:
    pair[1].step_s = 0.01
    async with wire_to(http.address) as wire:
        wire.ask(COMPLETIONS, {"prompt": "hello", "max_tokens": 900, "stream": True})
        assert (await wire.head()).status == 200
        for _ in range(3):
            await wire.chunk()
        await wire.hang_up()
        await until(lambda: pair[1].commands(Abort), 2.0)
    await left_everything(http)


async def test_a_hang_up_ends_every_prompt_of_a_list(http: HttpDoor, pair: Pair) -> None:
    held(pair[0], "token0")
    async with wire_to(http.address) as wire:
        wire.ask(COMPLETIONS, {"prompt": ["a", "b", "c"], "max_tokens": 5})
        await until(lambda: len(pair[0].commands(Prefill)) == 3)
        await wire.hang_up()
        await until(lambda: len(pair[0].commands(Abort)) == 3, 2.0)
    await left_everything(http)
    pair[0].let_go("token0")


async def test_a_hang_up_of_a_client_that_sent_two_requests_at_once_ends_the_first(http: HttpDoor, pair: Pair) -> None:
    held(pair[0], "token0")
    async with wire_to(http.address) as wire:
        wire.ask(COMPLETIONS, {"prompt": "a", "max_tokens": 5})
        wire.ask(COMPLETIONS, {"prompt": "b", "max_tokens": 5})
        await until(lambda: pair[0].commands(Prefill))
        await wire.hang_up(reset=True)
        await until(lambda: pair[0].commands(Abort), 2.0)
    await left_everything(http)
    pair[0].let_go("token0")


async def test_two_requests_sent_at_once_are_answered_in_their_order(http: HttpDoor, pair: Pair) -> None:
    async with wire_to(http.address) as wire:
        for tokens in (1, 2):
            wire.ask(COMPLETIONS, {"prompt": "a", "max_tokens": tokens})
        assert [(await wire.read()).json["usage"]["completion_tokens"] for _ in range(2)] == [1, 2]


async def test_a_client_that_goes_before_its_body_is_whole_leaves_nothing(http: HttpDoor, pair: Pair) -> None:
    async with wire_to(http.address) as wire:
        wire.writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        await wire.writer.drain()
        await asyncio.sleep(0.05)  # it is being read
        await wire.hang_up()
    await left_everything(http)
    assert not pair[0].commands(Prefill)


async def test_a_reader_that_stops_is_cut_off_and_its_connection_dropped(http: HttpDoor, pair: Pair) -> None:
    coordinator = http.grpc.coordinator
    pair[1].script = [97] * 100_000
    wire = await small_window(http.address)
    wire.ask(COMPLETIONS, {"prompt": "x", "max_tokens": 900, "stream": True, "n": 16})
    await until(lambda: coordinator.dispatcher._open)
    (stream,) = coordinator.dispatcher._open.values()
    await until(lambda: stream.stuck_s(time.monotonic()) > 0.2, 20.0)
    stream.cut_off(ResourceExhausted("too slow"))
    await left_everything(http)
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await wire.reader.readexactly(2**24)
    await wire.hang_up(reset=True)


async def test_while_it_drains_new_requests_are_refused_and_open_streams_end_well() -> None:
    async with (
        opened(http="127.0.0.1:0") as door,
        FakeWorker(Role.PREFILL, "p0") as prefill,
        FakeWorker(Role.DECODE, "d0") as decode,
    ):
        coordinator = door.coordinator
        assert coordinator.http is not None
        at = coordinator.http.address
        await join(door, prefill, decode)
        held(decode, "token 2")
        async with wire_to(at) as open_one, wire_to(at) as idle:
            idle.ask("/health", method="GET")
            assert (await idle.read()).status == 200
            open_one.ask(COMPLETIONS, {"prompt": "hello", "max_tokens": 4, "stream": True})
            assert (await open_one.head()).status == 200
            stopping = asyncio.ensure_future(coordinator.stop(5.0))
            await until(lambda: coordinator.http is not None and coordinator.http.door.draining)
            refused = await asked(at, COMPLETIONS, {"prompt": "x"})
            assert (refused.status, refused.headers["retry-after"]) == (503, "1")
            idle.ask("/health", method="GET")
            assert (await idle.read()).status == 503
            decode.let_go("token 2")
            body = b"".join([piece async for piece in _pieces(open_one)])
            assert body.count(b'"finish_reason":"length"') == 1
            assert body.endswith(b"data: [DONE]\n\n")
            began = time.monotonic()
            await stopping
            assert time.monotonic() - began < 4.0
            with pytest.raises(ConnectionRefusedError):
                await asked(at, COMPLETIONS, {"prompt": "x"})


async def test_what_is_open_after_the_grace_gets_an_error_event() -> None:
    async with (
        opened(http="127.0.0.1:0") as door,
        FakeWorker(Role.PREFILL, "p0") as prefill,
        FakeWorker(Role.DECODE, "d0") as decode,
    ):
        coordinator = door.coordinator
        assert coordinator.http is not None
        at = coordinator.http.address
        await join(door, prefill, decode)
        held(decode, "token 2")
        async with wire_to(at) as streams, wire_to(at) as whole:
            streams.ask(COMPLETIONS, {"prompt": "hello", "max_tokens": 4, "stream": True})
            whole.ask(COMPLETIONS, {"prompt": "hello", "max_tokens": 4})
            await streams.head()
            await until(lambda: len(decode.commands(Start)) == 2)
            stopping = asyncio.ensure_future(coordinator.stop(0.2))
            body = b"".join([piece async for piece in _pieces(streams)])
            assert b'data: {"error": {"message": "the coordinator is shutting down"' in body
            assert b"[DONE]" not in body
            answer = await whole.read()
            assert (answer.status, answer.error["code"]) == (503, "unavailable")
            await stopping
        decode.let_go("token 2")


async def _pieces(wire: Wire) -> Any:
    while piece := await wire.chunk():
        yield piece


async def test_each_prompt_has_a_trace_that_continues_the_callers() -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    config = CoordinatorConfig(listen="127.0.0.1:0", http="127.0.0.1:0", executor="hash")
    coordinator = Coordinator(config, MODEL, Tracing(provider, True))
    address = await coordinator.start()
    assert coordinator.http is not None
    at = coordinator.http.address
    caller = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with (
        open_channel(address) as channel,
        FakeWorker(Role.PREFILL, "p0") as prefill,
        FakeWorker(Role.DECODE, "d0") as decode,
    ):
        await join(Door(coordinator, address, channel), prefill, decode)
        body = {"prompt": ["a", "b"], "max_tokens": 4}
        await asked(at, COMPLETIONS, body, traceparent=caller, x_request_id="mine")
        await asked(at, COMPLETIONS, {"prompt": ""}, traceparent=caller)
        await coordinator.stop(1.0)
    spans = exporter.get_finished_spans()
    first, second, refused = (span for span in spans if span.name == "POST /v1/completions")
    for span, status in ((first, 200), (second, 200), (refused, 400)):
        assert f"{span.context.trace_id:032x}" == "0af7651916cd43dd8448eb211c80319c"
        assert span.parent is not None
        assert f"{span.parent.span_id:016x}" == "b7ad6b7169203331"
        assert span.attributes is not None
        assert span.attributes["http.response.status_code"] == status
        assert span.status.is_unset
    for span in (first, second):
        assert span.attributes is not None
        assert span.attributes["gen_ai.usage.output_tokens"] == 4
        assert span.attributes["kvrelay.request.label"] == "mine"
        below = {s.name for s in spans if s.parent is not None and s.parent.span_id == span.context.span_id}
        assert below == {"queue", "place", "reserve", "prefill", "kv.push", "decode"}
    sent = {c.work.traceparent for c in decode.commands(Reserve)}
    assert sent == {f"00-{s.context.trace_id:032x}-{s.context.span_id:016x}-01" for s in (first, second)}
