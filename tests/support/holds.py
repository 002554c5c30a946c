"""How long an event loop is held by what runs in it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import AsyncIterator


@contextlib.asynccontextmanager
async def holds() -> AsyncIterator[list[float]]:
    """Seconds of processor time that the loop's thread used between two turns of a task that is always ready.

    Not by the clock: on a busy machine that tells of the others. And not of collecting what earlier tests left, which a
    process that serves has put aside.
    """
    gc.collect()
    gc.freeze()
    seen = list[float]()

    async def watch() -> None:
        last = time.thread_time()
        while True:
            await asyncio.sleep(0.001)
            now = time.thread_time()
            seen.append(now - last)
            last = now

    task = asyncio.ensure_future(watch())
    try:
        yield seen
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        gc.unfreeze()
