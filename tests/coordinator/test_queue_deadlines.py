"""Deadlines that pass in the coordinator's queue: no worker ever hears of those requests."""

from __future__ import annotations

import asyncio

from support.door import Door, held, read_all, until
from support.fake_workers import FakeWorker

from kvrelay.errors import DeadlineExceeded
from kvrelay.session import Prefill, Reserve

EXPIRING = 200


async def test_what_expires_in_the_queue_reaches_no_worker(door: Door, pair: tuple[FakeWorker, FakeWorker]) -> None:
    """One after the other, so that each is in the queue well before its deadline."""
    prefill, decode = pair
    held(decode, "reserve")
    first = door.call(text="x" * 900)
    await until(lambda: decode.commands(Reserve))
    expiring = []
    for number in range(1, EXPIRING + 1):
        expiring.append(asyncio.ensure_future(read_all(door.call(timeout=1.0, text="y" * 900))))
        await until(lambda number=number: door.counters["started"] > number or expiring[-1].done())
    answers = await asyncio.gather(*expiring)
    assert {type(answer.error) for answer in answers} == {DeadlineExceeded}
    await until(lambda: door.coordinator.dispatcher.num_queued == 0)
    assert sum(answer.accepted is not None for answer in answers) > EXPIRING // 2, "hardly any came as far as the queue"
    decode.let_go("reserve")
    await until(lambda: prefill.commands(Prefill))
    assert (await read_all(first)).error is None
    await door.idle()
    assert (len(decode.commands(Reserve)), len(prefill.commands(Prefill))) == (1, 1)
