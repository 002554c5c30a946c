"""Moves go elsewhere where there is an elsewhere; requests asked for while nobody serves keep to the limit they had."""

from __future__ import annotations

import asyncio
import contextlib

from support.door import Door, Pairs, held, join, until
from support.fake_workers import FakeWorker

from kvrelay.requests import RequestId, Role
from kvrelay.session import Refused, Reserve


async def test_a_worker_that_fails_every_attempt_keeps_no_request_for_itself(door: Door, pairs: Pairs) -> None:
    """The one that takes nothing has always the fewest sequences; the other one is busy and well."""
    _, _, d0, d1 = pairs
    d0.refuse = Refused(RequestId("x"), 0, "Unavailable", "my link to prefill is broken")
    held(d1, "token 3")
    running, first = door.begin(text="q", max_tokens=5)
    await until(lambda: len(running.tokens) == 3)
    _, second = door.begin(text="r", max_tokens=3)
    assert (await second).error is None
    d1.let_go("token 3")
    assert (await first).error is None
    assert len(d0.commands(Reserve)) <= 2


async def test_a_request_that_waits_for_a_successor_is_held_to_the_pool_that_was_there(door: Door) -> None:
    async with FakeWorker(Role.PREFILL, "p0", num_blocks=4096) as p0:
        async with FakeWorker(Role.DECODE, "d0", num_blocks=64) as d0:
            await join(door, p0, d0)
        await until(lambda: [d.worker_id for d, _, _ in door.coordinator.roster.listing()] == ["p0"])
        _, asked = door.begin(text="q")
        async with FakeWorker(Role.DECODE, "d0", "two", num_blocks=64) as again:
            await again.announce_to(door.address)
            await until(lambda: bool(again.commands(Reserve)))
            assert again.commands(Reserve)[0].work.stop.max_tokens < 64 * 16
            asked.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asked
