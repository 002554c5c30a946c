"""A coordinator's metrics: every name has a sample from the start on, and what they count adds up."""

from __future__ import annotations

import pytest
from prometheus_client.core import Metric
from support.door import Door, held, until
from support.fake_workers import FakeWorker

from coordinator import registry
from kvrelay.errors import InvalidArgument, ResourceExhausted
from kvrelay.requests import RequestId
from kvrelay.session import Ended, Prefill, Refused, Report, Reserve
from kvrelay.telemetry import names

pytestmark = pytest.mark.parametrize("door", [{"metrics": "127.0.0.1:0", "open_limit": 3}], indirect=True)
ALL = {value for name, value in vars(names).items() if name.startswith("PROM_")}
OF_REAL_WORKERS = {names.PROM_COUNTS, names.PROM_CLOCK_ERROR}
"""Fakes count nothing and have no clock; see tests/e2e/test_causes.py."""


def told(door: Door) -> dict[str, Metric]:
    return {metric.name: metric for metric in door.coordinator._metrics.collect()}


def value(door: Door, name: str, **labels: str) -> float:
    """The sum over all samples with these labels; of a histogram the count."""
    samples = [sample for sample in told(door)[name].samples if labels.items() <= sample.labels.items()]
    return sum(sample.value for sample in samples if sample.name in (name, f"{name}_total", f"{name}_count"))


async def test_every_name_has_a_sample_before_the_first_request(
    door: Door, pair: tuple[FakeWorker, FakeWorker]
) -> None:
    assert {name for name, metric in told(door).items() if metric.samples} == ALL - OF_REAL_WORKERS


async def test_requests_that_end_well_are_cancelled_fail_and_are_refused_each_count_once(
    door: Door, pair: tuple[FakeWorker, FakeWorker]
) -> None:
    d0 = pair[1]
    for _ in range(5):
        assert (await door.ask(text="x", max_tokens=3)).error is None
    for _ in range(5):
        held(d0, "token 2")
        answer, asked = door.begin(text="x", max_tokens=3)
        await until(lambda answer=answer: len(answer.tokens) == 2)
        asked.cancel()
        await door.idle()
        d0.let_go("token 2")
    d0.refuse = Refused(RequestId(""), 0, "InvalidArgument", "no such token")
    for _ in range(5):
        assert isinstance((await door.ask(text="x", max_tokens=3)).error, InvalidArgument)
    d0.refuse = None
    held(d0, "token 2")
    open_ones = [door.begin(text="x", max_tokens=3) for _ in range(3)]
    await until(lambda: all(len(answer.tokens) == 2 for answer, _ in open_ones))
    for _ in range(5):
        assert isinstance((await door.ask(text="x", max_tokens=3)).error, ResourceExhausted)
    assert (value(door, names.PROM_OPEN), value(door, names.PROM_STARTED)) == (3, 18)
    d0.let_go("token 2")
    for _, asked in open_ones:
        assert (await asked).error is None
    await door.idle()
    outcomes = {s.labels["outcome"]: s.value for s in told(door)[names.PROM_OUTCOMES].samples if s.value}
    assert outcomes == {"length": 8, "Cancelled": 5, "InvalidArgument": 5}
    assert value(door, names.PROM_REFUSED) == 5
    assert value(door, names.PROM_STARTED) == sum(outcomes.values())
    assert value(door, names.PROM_TOKENS) == 8 * 3 + 5 * 2
    assert value(door, names.PROM_TTFT) == 8 + 5  # those that had a token
    assert value(door, names.PROM_DURATION) == 18


async def test_a_first_token_counts_once_however_often_its_prompt_was_computed_and_what_was_computed_anew_is_told(
    door: Door, pair: tuple[FakeWorker, FakeWorker]
) -> None:
    p0, d0 = pair
    for number in range(10):
        if number < 3:
            held(p0, "token0")
        _, asked = door.begin(text="hello", max_tokens=3)
        if number < 3:
            tries = await until_asked(p0, number + 1)
            p0.say(failed(tries[-1].work.request_id))
            await until_asked(p0, number + 1, attempts=2)
            p0.let_go("token0")
        assert (await asked).error is None
        await door.idle()
    assert value(door, names.PROM_TTFT) == 10
    assert value(door, names.PROM_MIGRATIONS, cause="worker_failed") == 3
    assert value(door, names.PROM_RECOMPUTED, cause="worker_failed") == 3 * 5
    held(d0, "token 2")
    answer, asked = door.begin(text="hello", max_tokens=3)
    await until(lambda: len(answer.tokens) == 2)
    d0.say(failed(p0.commands(Prefill)[-1].work.request_id))
    d0.let_go("token 2")
    assert (await asked).error is None
    assert value(door, names.PROM_RECOMPUTED) == 3 * 5 + 5 + 2
    assert value(door, names.PROM_RECOMPUTED, cause="worker_failed") == door.counters["recomputed_tokens"]


@pytest.mark.parametrize("refuses", ["decode", "prefill"])
async def test_what_nobody_had_begun_is_not_computed_anew(
    door: Door, pair: tuple[FakeWorker, FakeWorker], refuses: str
) -> None:
    """A worker that drains takes nothing: its requests move, and cost nothing but that."""
    prefill, decode = pair
    worker = decode if refuses == "decode" else prefill
    worker.refuse = Refused(RequestId(""), 0, "Unavailable", "draining")
    _, asked = door.begin(text="hello", max_tokens=3)
    await until(lambda: door.counters["migrated"])
    worker.refuse = None
    assert (await asked).error is None
    assert value(door, names.PROM_MIGRATIONS, cause="worker_not_taking") == door.counters["migrated"]
    assert value(door, names.PROM_RECOMPUTED) == 0


def failed(request_id: RequestId) -> Report:
    return Report(ended=(Ended(request_id, 0, 0, "failed", "Unavailable", "it starts again"),))


async def until_asked(worker: FakeWorker, requests: int, attempts: int = 1) -> list[Prefill]:
    """What it was told to compute, once the last of so many requests came to it so often."""

    def asked() -> list[Prefill]:
        told: list[Prefill] = worker.commands(Prefill)
        last = [command for command in told if command.work.request_id == told[-1].work.request_id]
        return told if len({c.work.request_id for c in told}) == requests and len(last) == attempts else []

    await until(asked)
    return asked()


async def test_they_can_be_read_in_the_midst_of_the_end_of_a_session(
    door: Door, pair: tuple[FakeWorker, FakeWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the endpoint's thread, which comes at any moment."""
    step, read = registry.step, list[float]()

    def reading(state: registry.Registry, event: registry.Event, now: float) -> registry.Step:
        if isinstance(event, registry.SessionDown):
            read.append(value(door, names.PROM_WORKER_UP))
        return step(state, event, now)

    monkeypatch.setattr(registry, "step", reading)
    pair[1].break_sessions()
    await until(lambda: read)
    assert read == [1.0]
    await until(lambda: value(door, names.PROM_WORKER_UP) == 2.0)


async def test_a_prompt_that_nobody_began_was_looked_for_in_no_cache(
    door: Door, pair: tuple[FakeWorker, FakeWorker]
) -> None:
    prefill, decode = pair
    prefill.cached_tokens = 3
    held(decode, "reserve")
    call = door.call(text="never begun", max_tokens=3)
    await call.read()
    await until(lambda: decode.commands(Reserve))
    call.cancel()
    await door.idle()
    decode.let_go("reserve")
    assert (await door.ask(text="hello", max_tokens=3)).error is None
    prefill.cached_tokens = 0
    assert (await door.ask(text="hello", max_tokens=3, prefix_cache=False)).error is None
    assert (value(door, names.PROM_CACHE_QUERIED), value(door, names.PROM_CACHE_MATCHED)) == (5, 3)
