"""Health of the coordinator's roles, asked for and watched, and whose call a stream is."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from support.door import MODEL, Door, join, until
from support.fake_workers import FakeWorker

from coordinator.main import Coordinator
from coordinator.readiness import health_name
from kvrelay.config import CoordinatorConfig
from kvrelay.requests import Role
from kvrelay.rpc.channel import open_channel
from kvrelay.telemetry import names
from kvrelay.telemetry.calls import LABEL_HEADER, OWN_HEADER
from kvrelay.telemetry.tracing import Tracing
from kvrelay.v1 import inference_pb2

FRONT = "kvrelay.v1.InferenceService"
NAMES = ["", FRONT, "kvrelay.v1.ModelService", "kvrelay.prefill", "kvrelay.decode"]


async def ready(door: Door) -> list[str]:
    """The names that are SERVING."""
    health = health_pb2_grpc.HealthStub(door.channel)
    answers = [await health.Check(health_pb2.HealthCheckRequest(service=name)) for name in NAMES]
    return [n for n, a in zip(NAMES, answers, strict=True) if a.status == health_pb2.HealthCheckResponse.SERVING]


async def until_ready(door: Door, *expected: str) -> None:
    async with asyncio.timeout(10):
        while set(now := await ready(door)) != {"", "kvrelay.v1.ModelService", *expected}:
            await asyncio.sleep(0.02)
            assert now


def test_the_names_of_roles_are_those_of_the_documentation() -> None:
    assert [health_name(role) for role in (Role.PREFILL, Role.DECODE)] == ["kvrelay.prefill", "kvrelay.decode"]


async def test_each_role_is_ready_while_it_has_a_worker(door: Door) -> None:
    assert await ready(door) == ["", "kvrelay.v1.ModelService"]
    async with FakeWorker(Role.DECODE, "d0") as decode:
        await join(door, decode)
        await until_ready(door, FRONT, "kvrelay.decode")
        async with FakeWorker(Role.PREFILL, "p0") as prefill:
            await join(door, decode, prefill)
            await until_ready(door, FRONT, "kvrelay.decode", "kvrelay.prefill")
        await until_ready(door, FRONT, "kvrelay.decode")
    await until_ready(door)


async def test_a_role_whose_only_worker_is_about_to_go_is_not_ready(
    door: Door, pair: tuple[FakeWorker, FakeWorker]
) -> None:
    await until_ready(door, FRONT, "kvrelay.decode", "kvrelay.prefill")
    about = pair[1].describe()
    door.coordinator.roster.leaving(about.worker_id, about.incarnation)
    await until_ready(door, FRONT, "kvrelay.prefill")


async def test_a_worker_that_says_with_its_loads_that_it_drains_makes_no_role_ready_though_no_goodbye_came(
    door: Door, pair: tuple[FakeWorker, FakeWorker]
) -> None:
    await until_ready(door, FRONT, "kvrelay.decode", "kvrelay.prefill")
    prefill = pair[0]
    load = replace(prefill.load(), draining=True)
    prefill.load = lambda: load  # type: ignore[method-assign]  # what it says is the test's to choose
    await until_ready(door, FRONT, "kvrelay.decode")


async def test_a_role_that_is_watched_tells_of_each_change(door: Door) -> None:
    watch = health_pb2_grpc.HealthStub(door.channel).Watch(health_pb2.HealthCheckRequest(service="kvrelay.decode"))
    word = health_pb2.HealthCheckResponse.ServingStatus.Name
    async with asyncio.timeout(15):
        assert word((await watch.read()).status) == "NOT_SERVING"
        async with FakeWorker(Role.DECODE, "d0") as decode:
            await join(door, decode)
            assert word((await watch.read()).status) == "SERVING"
        assert word((await watch.read()).status) == "NOT_SERVING"
    watch.cancel()


async def test_a_stream_begins_with_the_ids_of_its_call(door: Door, pair: tuple[FakeWorker, FakeWorker]) -> None:
    call = ask(door, "mine", max_tokens=2)
    told = dict(await call.initial_metadata())
    messages = [m async for m in call]
    assert told[LABEL_HEADER] == "mine"
    assert told[OWN_HEADER] == messages[0].accepted.request_id


def ask(door: Door, header: str, **fields: Any) -> Any:
    request = inference_pb2.GenerateRequest(text="a", **fields)
    return door.stub.Generate(request, metadata=((LABEL_HEADER, header),) if header else ())


@pytest.mark.parametrize(
    ("header", "field", "label"), [("h", "", "h"), ("", "f", "f"), ("h", "f", "f"), ("", "", None)]
)
async def test_the_label_in_the_request_goes_before_that_of_the_header(
    header: str, field: str, label: str | None
) -> None:
    spans, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(spans))
    coordinator = Coordinator(
        CoordinatorConfig(listen="127.0.0.1:0", executor="hash"), MODEL, Tracing(provider, is_on=True)
    )
    address = await coordinator.start()
    async with open_channel(address) as channel, FakeWorker(Role.DECODE, "d0") as decode:
        door = Door(coordinator, address, channel)
        await join(door, decode)
        call = ask(door, header, max_tokens=1, client_request_id=field)
        assert [m async for m in call]
        assert dict(await call.initial_metadata()).get(LABEL_HEADER, "") == header
        await until(lambda: any(s.name.endswith("Generate") for s in spans.get_finished_spans()))
    await coordinator.stop(0)
    (span,) = [s for s in spans.get_finished_spans() if s.name.endswith("Generate")]
    assert span.attributes is not None
    assert span.attributes.get(names.LABEL) == label
