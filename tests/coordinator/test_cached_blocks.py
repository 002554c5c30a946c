"""Following caches: gaps are closed by one call a worker, failures are tried again, an old session tells nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from support.door import until
from support.fake_workers import FakeWorker

from coordinator.cached_blocks import RETRY_S, CachedBlocks
from coordinator.session_wire import list_blocks
from kvrelay.blocks import BlockEventKind, BlockEvents, BlockKey, BlockList, BlockRun, KeyScope, block_keys
from kvrelay.errors import InvalidArgument, KVRelayError, Unavailable
from kvrelay.requests import Incarnation, Role, WorkerId
from kvrelay.rpc.block_convert import list_to_protos
from kvrelay.rpc.server import RpcServer
from kvrelay.session import WorkerDescription
from kvrelay.v1 import worker_pb2, worker_pb2_grpc

KEYS = block_keys(KeyScope("default", "f"), range(160), 16)
W = WorkerId("p0")
DESCRIPTION = FakeWorker(Role.PREFILL, "p0").describe()


def stored(first: int, *keys: BlockKey) -> tuple[BlockEvents, ...]:
    return (BlockEvents(first, (BlockRun(BlockEventKind.STORED, keys),)),)


class Lists:
    """Answers when a test says so: `answers` gets a list or an error per call."""

    def __init__(self) -> None:
        self.asked: list[WorkerDescription] = []
        self.answers: asyncio.Queue[BlockList | Exception] = asyncio.Queue()

    async def __call__(self, description: WorkerDescription) -> BlockList:
        self.asked.append(description)
        answer = await self.answers.get()
        if isinstance(answer, Exception):
            raise answer
        return answer


async def test_events_without_a_gap_ask_for_nothing() -> None:
    lists = Lists()
    cached = CachedBlocks(lists)
    cached.up(DESCRIPTION)
    cached.heard(W, stored(1, *KEYS[:2]))
    cached.heard(W, ())
    cached.heard(W, stored(3, KEYS[2]))
    await asyncio.sleep(0)
    assert (cached.index.depths(KEYS), lists.asked) == ({W: 3}, [])


async def test_a_gap_is_closed_by_one_call_and_events_meanwhile_are_kept() -> None:
    lists = Lists()
    cached = CachedBlocks(lists)
    cached.up(DESCRIPTION)
    cached.heard(W, stored(4, KEYS[3]))
    cached.heard(W, stored(5, KEYS[4]))
    cached.heard(W, ())
    await until(lambda: lists.asked)
    lists.answers.put_nowait(BlockList(5, KEYS[:4]))
    await until(lambda: cached.index.depths(KEYS) == {W: 5})
    cached.heard(W, ())
    await asyncio.sleep(0)
    assert lists.asked == [DESCRIPTION]


async def test_a_call_that_fails_is_made_again_with_a_report_a_second_later() -> None:
    lists = Lists()
    cached = CachedBlocks(lists)
    cached.up(DESCRIPTION)
    lists.answers.put_nowait(Unavailable("busy"))
    cached.heard(W, stored(4, KEYS[3]))
    await until(lambda: cached._followed[W].not_before > 0)
    cached.heard(W, ())
    await asyncio.sleep(0)
    assert len(lists.asked) == 1, "a second has not passed"
    assert cached._followed[W].not_before > time.monotonic() + RETRY_S - 0.5
    cached._followed[W].not_before -= RETRY_S
    lists.answers.put_nowait(BlockList(5, KEYS[:4]))
    cached.heard(W, ())
    await until(lambda: cached.index.depths(KEYS) == {W: 4})
    assert len(lists.asked) == 2


async def test_an_answer_for_a_session_that_is_over_counts_for_nothing() -> None:
    lists = Lists()
    cached = CachedBlocks(lists)
    cached.up(DESCRIPTION)
    cached.heard(W, stored(4, KEYS[3]))
    await until(lambda: lists.asked)
    cached.lost(W)
    cached.up(replace(DESCRIPTION, incarnation=Incarnation("two")))
    lists.answers.put_nowait(BlockList(5, KEYS[:4]))
    await asyncio.sleep(0.01)
    assert (cached.index.depths(KEYS), len(cached.index)) == ({}, 0)
    cached.heard(W, stored(1, KEYS[0]))
    assert cached.index.depths(KEYS) == {W: 1}
    cached.heard(WorkerId("stranger"), stored(1, KEYS[0]))
    assert cached.index.depths(KEYS) == {W: 1}


async def test_closing_ends_the_calls_under_way() -> None:
    lists = Lists()
    cached = CachedBlocks(lists)
    cached.up(DESCRIPTION)
    cached.heard(W, stored(4, KEYS[3]))
    await until(lambda: lists.asked)
    await asyncio.wait_for(cached.close(), 5)
    assert [t for t in asyncio.all_tasks() if t.get_name().startswith("blocks of")] == []


def _service(role: Role, pages: list[worker_pb2.BlockList]) -> Any:
    prefill = role is Role.PREFILL
    base: Any = worker_pb2_grpc.PrefillServiceServicer if prefill else worker_pb2_grpc.DecodeServiceServicer
    response: Any = (
        worker_pb2.PrefillServiceListBlocksResponse if prefill else worker_pb2.DecodeServiceListBlocksResponse
    )

    async def answer(self: object, request: object, context: object) -> AsyncIterator[Any]:
        for page in pages:
            yield response(blocks=page)

    return type("Lists", (base,), {"ListBlocks": answer})()


async def _asked(role: Role, pages: list[worker_pb2.BlockList]) -> BlockList:
    server = RpcServer()
    prefill = role is Role.PREFILL
    add: Any = (
        worker_pb2_grpc.add_PrefillServiceServicer_to_server
        if prefill
        else worker_pb2_grpc.add_DecodeServiceServicer_to_server
    )
    server.add(add, _service(role, pages), f"kvrelay.v1.{role.value.title()}Service")
    address = f"127.0.0.1:{server.bind('127.0.0.1:0')}"
    await server.start()
    try:
        return await list_blocks(replace(DESCRIPTION, role=role, address=address))
    finally:
        await server.stop(0)


@pytest.mark.parametrize("role", Role)
async def test_a_list_comes_over_grpc_in_pieces(role: Role) -> None:
    many = block_keys(KeyScope("default", "f"), range(10_000), 1)
    whole = BlockList(10_001, many)
    assert await _asked(role, list(list_to_protos(whole))) == whole


async def test_a_worker_without_lists_or_without_a_number_is_an_error() -> None:
    with pytest.raises(InvalidArgument):
        await _asked(Role.DECODE, [])
    async with FakeWorker(Role.PREFILL, "p0") as old:
        with pytest.raises(KVRelayError):
            await list_blocks(old.describe())
    with pytest.raises(KVRelayError):
        await list_blocks(old.describe())
