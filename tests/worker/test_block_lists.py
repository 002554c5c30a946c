"""A caller on the event loop asks the engine thread for its blocks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest
from support.greetings import DECODE

from decode_svc.service import DecodeService
from kvrelay.blocks import BlockCounts, BlockKey, BlockList, KVLayout
from kvrelay.errors import ResourceExhausted, Unavailable
from kvrelay.rpc.block_convert import list_from_protos
from kvrelay.rpc.server import RpcServer
from kvrelay.session import Load, ModelIdentity
from kvrelay.v1 import worker_pb2, worker_pb2_grpc
from prefill_svc.service import PrefillService
from worker import block_lists
from worker.block_lists import MOST_ASKING, BlockLists
from worker.events import BlocksAsked, BlocksListed, Event
from worker.mailbox import Mailbox
from worker.session_hub import SessionHub

MODEL, LAYOUT = ModelIdentity("m", "fp", 258, 100), KVLayout(1, 1, 16, 8, "uint8")
LOAD = Load(BlockCounts(8, 8))
BLOCKS = BlockList(5, (BlockKey(b"k" * 32),))


def asked(box: Mailbox[Event]) -> list[int]:
    return [event.token for event in box.take(0) if isinstance(event, BlocksAsked)]


async def begun(count: int, lists: BlockLists) -> list[asyncio.Task[BlockList]]:
    tasks = [asyncio.ensure_future(lists.ask()) for _ in range(count)]
    await asyncio.sleep(0)
    return tasks


async def test_each_question_gets_its_own_answer_in_any_order() -> None:
    box: Mailbox[Event] = Mailbox()
    lists = BlockLists(box)
    first, second = await begun(2, lists)
    one, two = asked(box)
    lists.deliver(BlocksListed(two, BlockList(9, ())))
    lists.deliver(BlocksListed(one, BLOCKS))
    assert await asyncio.wait_for(first, 5) == BLOCKS
    assert await asyncio.wait_for(second, 5) == BlockList(9, ())


async def test_an_engine_that_does_not_answer_is_unavailable_and_its_late_answer_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(block_lists, "ANSWER_S", 0.02)
    box: Mailbox[Event] = Mailbox()
    lists = BlockLists(box)
    with pytest.raises(Unavailable, match="did not answer"):
        await lists.ask()
    (token,) = asked(box)
    lists.deliver(BlocksListed(token, BLOCKS))


async def test_so_many_may_ask_at_once_and_those_that_left_count_no_more() -> None:
    box: Mailbox[Event] = Mailbox()
    lists = BlockLists(box)
    tasks = await begun(MOST_ASKING, lists)
    with pytest.raises(ResourceExhausted):
        await lists.ask()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    asked(box)
    (again,) = await begun(1, lists)
    lists.deliver(BlocksListed(asked(box)[0], BLOCKS))
    assert await asyncio.wait_for(again, 5) == BLOCKS


@pytest.mark.parametrize("role", ["Prefill", "Decode"])
async def test_a_list_travels_over_the_wire_of_both_roles(role: str) -> None:
    box: Mailbox[Event] = Mailbox()
    lists = BlockLists(box)
    blocks = BlockList(7, tuple(BlockKey(i.to_bytes(32, "little")) for i in range(5000)))
    service = (PrefillService if role == "Prefill" else DecodeService)(SessionHub(box, DECODE, lambda: LOAD), lists)
    server = RpcServer()
    server.add(getattr(worker_pb2_grpc, f"add_{role}ServiceServicer_to_server"), service, f"kvrelay.v1.{role}Service")
    port = server.bind("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = getattr(worker_pb2_grpc, f"{role}ServiceStub")(channel)
            call = stub.ListBlocks(getattr(worker_pb2, f"{role}ServiceListBlocksRequest")(), timeout=10)
            reading = asyncio.ensure_future(_read(call))
            async with asyncio.timeout(10):
                while not (tokens := asked(box)):  # noqa: ASYNC110  # the mailbox sets no event
                    await asyncio.sleep(0.005)
            lists.deliver(BlocksListed(tokens[0], blocks))
            pieces = await reading
    finally:
        await server.stop(1.0)
    assert len(pieces) == 2
    assert list_from_protos(pieces) == blocks


async def _read(call: AsyncIterator[Any]) -> list[worker_pb2.BlockList]:
    return [response.blocks async for response in call]
