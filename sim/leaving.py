"""A simulated worker that drains: the waits of worker.life around the rules of worker.drain, and an end of the node."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from worker.drain import DrainTimes, Leaving, is_quiet
from worker.life import LEAST_STOP_S, LOOK_S, STOP_GRACE_S

if TYPE_CHECKING:
    from sim.worker_node import WorkerNode

LATE_S = 0.5
"""A worker ends within its grace and this, for the time that its last step takes."""


class Departure:
    """Begins with the first Leave; a later one may shorten it."""

    def __init__(self, worker: WorkerNode) -> None:
        self._worker = worker
        self.times: DrainTimes | None = None
        self.late = False

    def ask(self, grace_s: float) -> None:
        first = self.times is None
        self.times = DrainTimes.of(grace_s, time.monotonic()).sooner(self.times)
        if first:
            self._worker.node.spawn(self._leave(), "leaving")

    async def _leave(self) -> None:
        worker = self._worker
        assert self.times is not None
        goodbye = asyncio.ensure_future(worker.registration.leave())
        wait, done = Leaving(self.times, time.monotonic()), False
        while not done:
            await asyncio.sleep(LOOK_S)
            now = time.monotonic()
            wait, done = replace(wait, times=self.times).look(worker.load, worker.hub.num_sessions, now)
            done = done and (goodbye.done() or now >= self.times.close_at)
        worker.hub.end_all("the worker is stopping")
        left_s = self.times.ends_at - time.monotonic() - LEAST_STOP_S
        ends_at = time.monotonic() + min(STOP_GRACE_S, max(LEAST_STOP_S, left_s))
        while not is_quiet(worker.load) and time.monotonic() < ends_at:  # noqa: ASYNC110  # as worker.life waits
            await asyncio.sleep(LOOK_S)
        self.late = time.monotonic() > self.times.ends_at + LATE_S
        worker.exited = 0
        worker.node.crash("drained, exit 0")
