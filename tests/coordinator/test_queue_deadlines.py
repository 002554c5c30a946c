"""Deadlines that pass in the coordinator's queue: no worker ever hears of those requests."""

from __future__ import annotations

import asyncio

import pytest
from support.door import Door, held, read_all, until
from support.fake_workers import FakeWorker

from kvrelay.errors import DeadlineExceeded
from kvrelay.session import Prefill, Reserve

EXPIRING = 1000


@pytest.mark.parametrize("door", [{"queue_limit": EXPIRING, "open_limit": EXPIRING + 10}], indirect=True)
async def test_a_thousand_that_expire_in_the_queue_reach_no_worker(
    door: Door, pair: tuple[FakeWorker, FakeWorker]
) -> None:
    prefill, decode = pair
    held(decode, "reserve")
    first = door.call(text="x" * 900)
    await until(lambda: decode.commands(Reserve))
    expiring = [asyncio.ensure_future(door.ask(timeout=3.0, text="y" * 900)) for _ in range(EXPIRING)]
    answers = await asyncio.gather(*expiring)
    assert {type(answer.error) for answer in answers} == {DeadlineExceeded}
    await until(lambda: door.coordinator.dispatcher.num_queued == 0)
    assert door.counters["started"] > EXPIRING // 10, "hardly any came as far as the queue"
    assert len(decode.commands(Reserve)) == 1
    decode.let_go("reserve")
    await until(lambda: prefill.commands(Prefill))
    assert (await read_all(first)).error is None
    await door.idle()
    assert (len(decode.commands(Reserve)), len(prefill.commands(Prefill))) == (1, 1)
