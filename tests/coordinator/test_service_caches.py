"""A coordinator over real gRPC and workers that tell what they cache: where requests go, and what is reported."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.door import Answer, Door, join, until
from support.fake_workers import FakeWorker

from coordinator.main import INFERENCE
from kvrelay.blocks import BlockEventKind, BlockEvents, BlockRun, KeyScope, block_keys
from kvrelay.errors import InvalidArgument
from kvrelay.models.builtin import builtin_identity
from kvrelay.requests import Role
from kvrelay.session import Prefill, Report, Reserve, WorkerDescription
from kvrelay.v1 import model_pb2, model_pb2_grpc

PROMPT = "a prompt that is long enough to fill four blocks of sixteen bytes each."
FINGERPRINT = builtin_identity("hash").fingerprint


class CachingWorker(FakeWorker):
    def describe(self, **changes: Any) -> WorkerDescription:
        return super().describe(**{"prefix_cache": True, **changes})

    def cached(self, text: str, salt: str = "") -> None:
        """Its first events: the blocks of this text."""
        scope = KeyScope("default", FINGERPRINT, cache_salt=salt)
        keys = block_keys(scope, list(text.encode()), 16)
        self.say(Report(block_events=(BlockEvents(1, (BlockRun(BlockEventKind.STORED, keys),)),)))


@pytest_asyncio.fixture
async def caching(door: Door) -> AsyncIterator[dict[str, CachingWorker]]:
    names = [("p0", Role.PREFILL), ("p1", Role.PREFILL), ("d0", Role.DECODE), ("d1", Role.DECODE)]
    workers = {name: CachingWorker(role, name) for name, role in names}
    for worker in workers.values():
        await worker.__aenter__()
    await join(door, *workers.values())
    yield workers
    for worker in workers.values():
        await worker.die()


async def tell(door: Door, workers: dict[str, CachingWorker], *names: str, salt: str = "") -> None:
    for name in names:
        workers[name].cached(PROMPT, salt)
    index = door.coordinator.roster.snapshot().index
    await until(lambda: all(index.num_keys(name) == 4 for name in names))  # type: ignore[attr-defined]  # a PrefixIndex


def went(answer: Answer) -> tuple[str, str]:
    assert answer.error is None
    assert answer.finished is not None
    return answer.finished.prefill_worker, answer.finished.decode_worker


async def test_a_prompt_goes_where_its_beginning_is_cached(door: Door, caching: dict[str, CachingWorker]) -> None:
    await tell(door, caching, "p1", "d1")
    for _ in range(3):
        assert went(await door.ask(text=PROMPT + "!", max_tokens=3)) == ("p1", "d1")
    other = [went(await door.ask(text="!" + PROMPT, max_tokens=3)) for _ in range(2)]
    assert set(other) == {("p0", "d0"), ("p1", "d1")}


async def test_salts_and_requests_that_want_no_cache_find_nothing(
    door: Door, caching: dict[str, CachingWorker]
) -> None:
    await tell(door, caching, "p1", "d1", salt="mine")
    assert [went(await door.ask(text=PROMPT, max_tokens=3, cache_salt="mine")) for _ in range(2)] == [("p1", "d1")] * 2
    assert went(await door.ask(text=PROMPT, max_tokens=3, cache_salt="other")) == ("p0", "d0")
    assert went(await door.ask(text=PROMPT, max_tokens=3, cache_salt="mine")) == ("p1", "d1")
    assert went(await door.ask(text=PROMPT, max_tokens=3, cache_salt="mine", prefix_cache=False)) == ("p0", "d0")


@pytest.mark.parametrize("door", [{"router": "least_loaded"}], indirect=True)
async def test_other_policies_do_not_look_at_caches(door: Door, caching: dict[str, CachingWorker]) -> None:
    await tell(door, caching, "p1", "d1")
    assert went(await door.ask(text=PROMPT, max_tokens=3)) == ("p0", "d0")


async def test_a_lost_worker_is_forgotten_with_all_that_it_cached(
    door: Door, caching: dict[str, CachingWorker]
) -> None:
    await tell(door, caching, "p1", "d1")
    await caching["p1"].die()
    await until(lambda: len(door.coordinator.roster.listing()) == 3)
    index = door.coordinator.roster.snapshot().index
    assert index.depths(block_keys(KeyScope("default", FINGERPRINT), list(PROMPT.encode()), 16)) == {"d1": 4}
    assert went(await door.ask(text=PROMPT, max_tokens=3)) == ("p0", "d1")


@pytest.mark.parametrize("door", [{"local_prefill_below": 16}], indirect=True)
async def test_what_is_nearly_all_cached_on_decode_is_computed_there(
    door: Door, caching: dict[str, CachingWorker]
) -> None:
    await tell(door, caching, "d1")
    assert went(await door.ask(text=PROMPT, max_tokens=3)) == ("", "d1")
    assert [c.local_prefill for c in caching["d1"].commands(Reserve)] == [True]
    assert went(await door.ask(text="!" + PROMPT, max_tokens=3))[0] != ""


async def test_the_model_tells_the_smallest_prefix_that_can_be_cached(door: Door) -> None:
    stub = model_pb2_grpc.ModelServiceStub(door.channel)
    async with FakeWorker(Role.DECODE, "d0") as plain, CachingWorker(Role.DECODE, "d1") as caching:
        await join(door, plain)
        assert (await stub.GetModel(model_pb2.GetModelRequest())).smallest_cacheable_prefix == 0
        await caching.announce_to(door.address)
        await until(lambda: len(door.coordinator.roster.listing()) == 2)
        assert (await stub.GetModel(model_pb2.GetModelRequest())).smallest_cacheable_prefix == 16


async def test_decode_workers_alone_serve_everything(door: Door) -> None:
    health = health_pb2_grpc.HealthStub(door.channel)
    async with FakeWorker(Role.DECODE, "d0", num_blocks=4) as decode:
        await join(door, decode)
        assert went(await door.ask(text="x" * 20, max_tokens=5)) == ("", "d0")
        assert went(await door.ask(text="x" * 20, max_tokens=1)) == ("", "d0")
        too_long = await door.ask(text="x" * 64)
        assert isinstance(too_long.error, InvalidArgument), "its pool is the limit"
        async with asyncio.timeout(5):
            async for answer in health.Watch(health_pb2.HealthCheckRequest(service=INFERENCE)):
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    break
        async with FakeWorker(Role.PREFILL, "p0", num_blocks=4) as prefill:
            await prefill.announce_to(door.address)
            await until(lambda: len(door.coordinator.roster.listing()) == 2)
            assert went(await door.ask(text="x" * 20, max_tokens=5)) == ("p0", "d0")
            assert len(prefill.commands(Prefill)) == 1


async def test_the_limit_of_decode_workers_that_are_gone_holds_for_who_asks_meanwhile(door: Door) -> None:
    async with FakeWorker(Role.DECODE, "d0", num_blocks=4) as decode:
        await join(door, decode)
        assert door.coordinator.roster.context_limit == 64
    await until(lambda: not door.coordinator.roster.listing())
    assert door.coordinator.roster.context_limit == 64
