"""Traces of mixed requests are whole, kept by what happened at their end, and never in the way of serving."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from support.door import MODEL, Door, join, until
from support.fake_workers import FakeWorker

from coordinator.main import Coordinator
from kvrelay.config import CoordinatorConfig
from kvrelay.requests import Role
from kvrelay.rpc.channel import open_channel
from kvrelay.session import Ended, Landed, Report, Start, TokenOut
from kvrelay.steps import StepRecord
from kvrelay.telemetry import names, tracing
from kvrelay.telemetry.export import Dropped, Gate, Queue
from kvrelay.telemetry.tracing import Tracing
from kvrelay.v1 import inference_pb2, inference_pb2_grpc

ROOT = "kvrelay.v1.InferenceService/Generate"


class World:
    """A coordinator with workers that compute nothing, and every span that was let through."""

    def __init__(self, ratio: float = 1.0, slow_s: float = 0.0) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(Gate(ratio, [SimpleSpanProcessor(self.exporter)]))
        config = CoordinatorConfig(
            listen="127.0.0.1:0", executor="hash", trace_ratio=ratio, trace_slow_s=slow_s, open_limit=4096
        )
        self.coordinator = Coordinator(config, MODEL, Tracing(provider, True, ratio))

    async def __aenter__(self) -> World:
        self.address = await self.coordinator.start()
        self.channel = open_channel(self.address)
        self.door = Door(self.coordinator, self.address, self.channel)
        self.stub = inference_pb2_grpc.InferenceServiceStub(self.channel)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.channel.close()
        await self.coordinator.stop(0)

    def spans(self) -> Sequence[ReadableSpan]:
        return self.exporter.get_finished_spans()

    async def ask(self, **fields: object) -> None:
        async for _ in self.stub.Generate(inference_pb2.GenerateRequest(**fields)):  # type: ignore[arg-type]
            pass


def check_whole(spans: Sequence[ReadableSpan]) -> dict[int, ReadableSpan]:
    """No orphan, nothing that ends before it begins; the roots by trace id."""
    ids = {span.context.span_id for span in spans if span.context}
    for span in spans:
        assert span.parent is None or span.parent.is_remote or span.parent.span_id in ids, span.name
        assert span.start_time is not None and span.end_time is not None and span.start_time <= span.end_time
    return {span.context.trace_id: span for span in spans if span.name == ROOT and span.context}


async def test_of_a_thousand_mixed_requests_each_has_one_whole_tree_and_outcomes_add_up() -> None:
    rng = random.Random(7)
    async with (
        World() as world,
        FakeWorker(Role.PREFILL, "p0") as prefill,
        FakeWorker(Role.DECODE, "d0") as first,
        FakeWorker(Role.DECODE, "d1") as second,
    ):
        await join(world.door, prefill, first, second)
        limit, seen = asyncio.Semaphore(40), Counter[str]()

        async def one(number: int) -> None:
            kind = rng.choice(("plain", "plain", "cancel", "bad", "single", "several"))
            async with limit:
                seen[kind] += 1
                if number % 100 == 50:  # a worker's bug: its requests move
                    rng.choice((first, second)).break_sessions()
                    for worker in (first, second):
                        await worker.announce_to(world.address)
                await run(kind)

        async def run(kind: str) -> None:
            if kind == "cancel":
                call = world.stub.Generate(inference_pb2.GenerateRequest(text="hello", max_tokens=50))
                await call.read()
                call.cancel()
            elif kind == "bad":
                with pytest.raises(Exception, match="max_tokens"):
                    await world.ask(text="hello", max_tokens=0)
            elif kind == "several":
                await tolerant(world.ask(text="hello", max_tokens=4, n=2))
            else:
                await tolerant(world.ask(text="hello", max_tokens=1 if kind == "single" else 6))

        async def tolerant(asked: object) -> None:
            try:
                await asked  # type: ignore[misc]  # a coroutine
            except Exception:
                seen["failed"] += 1

        await asyncio.gather(*(one(number) for number in range(1000)))
        figures = world.coordinator.figures
        await until(lambda: figures.open == 0 and len(check_whole(world.spans())) == 1000, 10.0)
        roots = check_whole(world.spans())
        assert figures.started == sum(figures.outcomes.values())
        told = Counter(str((root.attributes or {}).get("kvrelay.request.outcome")) for root in roots.values())
        assert told.pop("None") == seen["bad"]
        assert told == figures.outcomes
        assert any(span.name == "migrate" for span in world.spans())
        assert figures.outcomes["Cancelled"] > 0 and figures.outcomes["length"] > 500


@pytest.mark.parametrize("n", [1, 2])
async def test_a_hand_off_is_told_though_one_report_brings_landed_with_the_whole_answer(n: int) -> None:
    """As a slow line does it, which holds the report with landed up until decode has nothing left to say."""
    async with (
        World() as world,
        FakeWorker(Role.PREFILL, "p0") as prefill,
        FakeWorker(Role.DECODE, "d0") as decode,
    ):
        await join(world.door, prefill, decode)
        decode.hold["decode"] = asyncio.Event()
        asked = asyncio.ensure_future(world.ask(text="hello", max_tokens=3, n=n))
        await until(lambda: decode.commands(Start))
        rid = decode.commands(Start)[0].request_id
        tokens = tuple(TokenOut(rid, 0, s, index, 97) for index in (1, 2) for s in range(n))
        ended = tuple(Ended(rid, 0, s, "length") for s in range(n))
        decode.say(Report(landed=(Landed(rid, 0),), tokens=tokens, ended=ended))
        await asked
        await until(lambda: world.coordinator.figures.open == 0)
        check_whole(world.spans())
        [push] = [span for span in world.spans() if span.name == names.SPAN_PUSH]
        assert (push.attributes or {})[names.EXPOSED_S] == 0.001  # as the fake says it


async def test_what_is_not_sampled_is_kept_when_it_was_slow_and_only_then() -> None:
    async with (
        World(ratio=0.0, slow_s=0.15) as world,
        FakeWorker(Role.PREFILL, "p0") as prefill,
        FakeWorker(Role.DECODE, "d0") as decode,
    ):
        await join(world.door, prefill, decode)
        await world.ask(text="hello", max_tokens=4)
        decode.hold["token 2"] = asyncio.Event()
        slow = asyncio.ensure_future(world.ask(text="hello", max_tokens=4))
        await asyncio.sleep(0.4)  # longer than slow_s: the time is what is tested
        decode.let_go("token 2")
        await slow
        await until(lambda: world.coordinator.figures.open == 0)
        [root] = check_whole(world.spans()).values()
        assert (root.attributes or {})["kvrelay.trace.kept"] == "slow"
        [segment] = [span for span in world.spans() if span.name == "decode"]
        [event] = segment.events
        assert (event.attributes or {})["kvrelay.gap.index"] == 2
        assert float((event.attributes or {})["kvrelay.gap.seconds"]) > 0.3  # type: ignore[arg-type]


async def test_nothing_is_kept_or_collected_with_ratio_zero_and_no_limit() -> None:
    async with (
        World(ratio=0.0) as world,
        FakeWorker(Role.PREFILL, "p0") as prefill,
        FakeWorker(Role.DECODE, "d0") as decode,
    ):
        await join(world.door, prefill, decode)
        await world.ask(text="hello", max_tokens=4)
        with pytest.raises(Exception, match="max_tokens"):
            await world.ask(text="hello", max_tokens=0)
        await until(lambda: world.coordinator.figures.open == 0)
        assert [span.name for span in world.spans()] == []


class Stuck(SpanExporter):
    """A collector that takes nothing."""

    def __init__(self) -> None:
        self.asked = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.asked += len(spans)
        return SpanExportResult.FAILURE


def test_spans_that_no_collector_takes_are_counted() -> None:
    dropped, exporter = Dropped(), Stuck()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(Gate(1.0, [Queue(exporter, dropped, limit=8, batch=4, delay_s=60.0)]))
    tracer = provider.get_tracer("test")
    for _ in range(3):
        tracer.start_span("a").end()
    provider.force_flush()
    assert (exporter.asked, dropped.count) == (3, 3)
    provider.shutdown()


def test_spans_beyond_the_queue_are_counted_and_the_others_kept() -> None:
    exporter, dropped = InMemorySpanExporter(), Dropped()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(Gate(1.0, [Queue(exporter, dropped, limit=8, batch=16, delay_s=60.0)]))
    tracer = provider.get_tracer("test")
    for _ in range(20):
        tracer.start_span("a").end()
    assert dropped.count == 12
    provider.force_flush()
    assert len(exporter.get_finished_spans()) == 8
    tracer.start_span("b").end()
    provider.force_flush()
    assert (len(exporter.get_finished_spans()), dropped.count) == (9, 12)
    provider.shutdown()


async def test_steps_whose_times_are_no_times_of_this_world_do_not_end_the_coordinator() -> None:
    async with World() as world, FakeWorker(Role.DECODE, "d0") as decode:
        await join(world.door, decode)
        steps, about = world.coordinator.dispatcher.steps, decode.describe()
        for at in (1e300, 5.0):
            await until(lambda: steps.of(about.worker_id) and decode.sessions)
            decode.say(Report(steps=(StepRecord(1, at, 0.1),), step_tokens=(0,)))
            await until(lambda: any(each.untold for each in steps.all()))
            decode.break_sessions()  # what a lost worker has left is told, though its clock was never known
            await until(lambda: not any(each.untold for each in steps.all()))
        await until(lambda: [span.name for span in world.spans()] == [names.SPAN_STEPS])
        assert not any(task.done() for task in world.coordinator._tasks)


async def test_a_dead_collector_costs_a_counter_and_no_answer() -> None:
    traced = tracing.setup("test", otlp_endpoint="http://127.0.0.1:9")
    config = CoordinatorConfig(listen="127.0.0.1:0", executor="hash", otlp_endpoint="http://127.0.0.1:9")
    coordinator = Coordinator(config, MODEL, traced)
    address = await coordinator.start()
    async with (
        open_channel(address) as channel,
        FakeWorker(Role.PREFILL, "p0") as prefill,
        FakeWorker(Role.DECODE, "d0") as decode,
    ):
        await join(Door(coordinator, address, channel), prefill, decode)
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        for _ in range(5):
            async for _ in stub.Generate(inference_pb2.GenerateRequest(text="hello", max_tokens=3)):
                pass
        await asyncio.to_thread(traced.close, 6.0)
        await until(lambda: traced.dropped.count > 0, 10.0)
        await coordinator.stop(0)
