"""Calls that end while the coordinator has not placed them yet: no worker ever hears of those requests."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from support.door import Door, held, read_all, slow_tokenizer, until
from support.fake_workers import FakeWorker

from coordinator.text import LONG_TEXT
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


@pytest.mark.parametrize("how", ["cancel", "deadline"])
async def test_what_ends_while_its_prompt_is_tokenized_is_never_taken_in(
    door: Door, pair: tuple[FakeWorker, FakeWorker], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    tokenizing = door.coordinator.serving.tokenizing
    with slow_tokenizer(monkeypatch) as begun:
        call = door.call(timeout=0.3 if how == "deadline" else None, text="x" * LONG_TEXT, truncate_prompt=8)
        await until(begun.is_set)
        if how == "cancel":
            call.cancel()
        wanted = grpc.StatusCode.CANCELLED if how == "cancel" else grpc.StatusCode.DEADLINE_EXCEEDED
        assert await call.code() is wanted
        await until(lambda: door.coordinator.server.edge.running == 0, 2.0)
        assert tokenizing._waiting == 1, "the thread is at it still"
    await until(lambda: tokenizing._waiting == 0)
    assert (door.counters["started"], pair[1].commands(Reserve)) == (0, [])
    assert (await door.ask(text="x", max_tokens=2)).error is None
