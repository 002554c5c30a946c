"""Priority through the door: in which order a worker with one row hears of what waits for it, and as what."""

from __future__ import annotations

import asyncio
import time

import pytest
from support.door import Answer, Door, held, join, until
from support.fake_workers import FakeWorker, OneRow

from kvrelay.errors import ResourceExhausted
from kvrelay.requests import Priority, Role
from kvrelay.session import Reserve
from kvrelay.v1 import common_pb2

BATCH, NORMAL, INTERACTIVE = common_pb2.PRIORITY_BATCH, common_pb2.PRIORITY_NORMAL, common_pb2.PRIORITY_INTERACTIVE


async def ask(door: Door, length: int, priority: int | None = None) -> asyncio.Task[Answer]:
    """A request named by the length of its prompt, once it is placed or waits."""
    started = door.counters["started"]
    fields = {} if priority is None else {"priority": priority}
    task = door.begin(text="x" * length, max_tokens=2, **fields)[1]
    await until(lambda: door.counters["started"] > started or task.done())
    return task


def heard(decode: FakeWorker) -> list[int]:
    return [len(command.work.token_ids) for command in decode.commands(Reserve)]


async def test_what_waits_for_a_busy_worker_is_placed_by_class(door: Door) -> None:
    async with OneRow(Role.DECODE, "d0") as decode:
        await join(door, decode)
        held(decode, "token0")
        calls = [await ask(door, length) for length in (1, 2)]
        await until(lambda: heard(decode) == [1, 2])
        calls += [await ask(door, length, BATCH) for length in (3, 4, 5)]
        calls += [await ask(door, 6), await ask(door, 7, NORMAL), await ask(door, 8, INTERACTIVE)]
        assert door.coordinator.dispatcher.num_queued == 6
        assert heard(decode) == [1, 2]
        decode.let_go("token0")
        answers = await asyncio.gather(*calls)
        assert [answer.error for answer in answers] == [None] * 8
        assert {tuple(answer.ids) for answer in answers} == {(97, 98)}
        assert heard(decode) == [1, 2, 8, 6, 7, 3, 4, 5]
        known = {len(command.work.token_ids): command.work.priority for command in decode.commands(Reserve)}
        assert [known[length] for length in (6, 7, 8)] == [Priority.NORMAL, Priority.NORMAL, Priority.INTERACTIVE]
        assert {known[length] for length in (3, 4, 5)} == {Priority.BATCH}
        await door.idle()


@pytest.mark.parametrize("door", [{"queue_limit": 2}], indirect=True)
async def test_a_full_queue_refuses_any_class_and_drops_none_that_waits(door: Door) -> None:
    async with OneRow(Role.DECODE, "d0") as decode:
        await join(door, decode)
        held(decode, "token0")
        calls = [await ask(door, length, BATCH) for length in (1, 2, 3, 4)]
        refused = await (await ask(door, 5, INTERACTIVE))
        assert isinstance(refused.error, ResourceExhausted)
        decode.let_go("token0")
        assert [answer.error for answer in await asyncio.gather(*calls)] == [None] * 4
        assert heard(decode) == [1, 2, 3, 4]
        await door.idle()


async def test_what_was_lost_with_its_worker_goes_behind_a_higher_class_that_waits(door: Door) -> None:
    """Both that were lost have a token already: they come to the other worker one longer."""
    dispatcher = door.coordinator.dispatcher
    queue = dispatcher._queue
    async with OneRow(Role.DECODE, "d1") as full:
        await join(door, full)
        held(full, "token0")
        calls = [await ask(door, length) for length in (10, 11)]
        await until(lambda: heard(full) == [10, 11])
        async with OneRow(Role.DECODE, "d0") as lost:
            await lost.announce_to(door.address)
            held(lost, "decode")
            calls += [await ask(door, 20, BATCH), await ask(door, 40), await ask(door, 30, INTERACTIVE)]
            await until(lambda: [live.state.num_tokens for live in dispatcher._live.values()] == [0, 0, 1, 1, 0])
            assert sorted(heard(lost)) == [20, 40]  # in either order: it may be there before the second one is
        await until(lambda: [len(live.facts.prompt_ids) for live in queue.lives()] == [30, 40, 20])
        await until(lambda: all(live.not_before <= time.monotonic() for live in queue.lives()))
        full.let_go("token0")
        assert [answer.error for answer in await asyncio.gather(*calls)] == [None] * 5
        assert heard(full) == [10, 11, 30, 41, 21]
        await door.idle()
