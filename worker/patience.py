"""Waiting with a bound in which one's own pauses do not count: a peer is never blamed for them. Knows no peers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import TypeVar

from kvrelay.liveness import Liveness

CHECK_S = 0.25

T = TypeVar("T")


async def within(limit_s: float, work: Awaitable[T]) -> T:
    """The result of `work`, or TimeoutError, and `work` cancelled, after limit_s in which our timers were on time."""
    task = asyncio.ensure_future(work)
    patience = Liveness.start(limit_s, time.monotonic())
    try:
        while not task.done():
            await asyncio.wait([task], timeout=CHECK_S)
            patience, gone = patience.check(time.monotonic(), CHECK_S)
            if gone and not task.done():
                raise TimeoutError
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        elif not task.cancelled():
            task.exception()  # we may be cancelled at the very moment it failed: then nobody else looks at it
