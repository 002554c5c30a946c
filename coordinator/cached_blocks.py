"""Follows what the workers of this coordinator cache: events as they come, the whole list where some were missed.

Knows sessions only by when they begin and end. One list at a time is asked for per worker; a call that fails is made
again with a later report. Everything runs on one event loop.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import structlog

from coordinator.prefix_index import PrefixIndex
from coordinator.session_wire import ListBlocks
from kvrelay.blocks import BlockEvents
from kvrelay.requests import WorkerId
from kvrelay.session import WorkerDescription

log = structlog.get_logger("coordinator.cached_blocks")

RETRY_S = 1.0


@dataclass(slots=True)
class _Followed:
    """One worker's session. wanted: its list is, but not before not_before; task: the call under way."""

    description: WorkerDescription
    wanted: bool = False
    not_before: float = 0.0
    task: asyncio.Task[None] | None = None


class CachedBlocks:
    def __init__(self, list_blocks: ListBlocks) -> None:
        self.index = PrefixIndex()
        self._list_blocks = list_blocks
        self._followed: dict[WorkerId, _Followed] = {}

    def up(self, description: WorkerDescription) -> None:
        """A session has begun. A worker that cached anything before says so, with the number of its next event."""
        self.lost(description.worker_id)
        self._followed[description.worker_id] = _Followed(description)

    def heard(self, worker: WorkerId, events: tuple[BlockEvents, ...]) -> None:
        """With every report, also one without events."""
        followed = self._followed.get(worker)
        if followed is None:
            return
        for some in events:
            if not self.index.apply(worker, some):
                followed.wanted = True
        if followed.wanted and followed.task is None and time.monotonic() >= followed.not_before:
            work = self._fetch(worker, followed)
            followed.task = asyncio.get_running_loop().create_task(work, name=f"blocks of {worker}")

    def lost(self, worker: WorkerId) -> None:
        """Its session is over; void if there was none."""
        followed = self._followed.pop(worker, None)
        self.index.forget(worker)
        if followed is not None and followed.task is not None:
            followed.task.cancel()

    async def close(self) -> None:
        """Ends every call that is under way."""
        tasks = [followed.task for followed in self._followed.values() if followed.task is not None]
        for worker in list(self._followed):
            self.lost(worker)
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _fetch(self, worker: WorkerId, followed: _Followed) -> None:
        try:
            blocks = await self._list_blocks(followed.description)
            if self._followed.get(worker) is followed:
                followed.wanted = not self.index.replace(worker, blocks)
        except Exception as error:  # whatever it is, requests are served without it
            log.info("no list of cached blocks", worker=worker, why=f"{type(error).__name__}: {error}")
            followed.not_before = time.monotonic() + RETRY_S
        finally:
            followed.task = None
