"""Drains a worker over the admin service and follows it until it is gone and back. Prints through a callback."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvrelay.client import AsyncClient, WorkerStatus
from kvrelay.errors import DeadlineExceeded, NotFound, Unavailable

POLL_S = 0.2
LATE_S = 10.0
"""A worker that is still here so long after its grace does not go."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Progress:
    """What came of it; also what --json prints. gone_s and back_s: since the command began, None if not seen.

    back: the new incarnation under the same id.
    """

    worker: str
    incarnation: str
    grace_s: float
    gone_s: float | None = None
    back_s: float | None = None
    back: str | None = None


async def run(target: str, worker_id: str, grace_s: float, wait: bool, back_s: float, say: Say) -> Progress:
    """Raises NotFound for an unknown worker, naming the known ones, and DeadlineExceeded when it does not go."""
    async with AsyncClient(target) as client:
        found = await _find(client, worker_id)
        begun_at = time.monotonic()
        await client.drain_worker(worker_id, grace_s=grace_s)
        incarnation = found["incarnation"]
        say(f"{worker_id} (incarnation {incarnation[:6]}) drains: {grace_s:g} s at most; {_left(found)}")
        if not wait:
            return Progress(worker_id, incarnation, grace_s)
        now = await _until_gone(client, found, begun_at + grace_s + LATE_S, say)
        gone_s = time.monotonic() - begun_at
        say(f"{worker_id} has gone after {gone_s:.1f} s")
        if now is None and back_s > 0:
            say(f"waiting {back_s:g} s at most for somebody to start it again")
            now = await _until_back(client, worker_id, time.monotonic() + back_s)
        if now is None:
            if back_s > 0:
                say(f"{worker_id} did not come back")
            return Progress(worker_id, incarnation, grace_s, round(gone_s, 3))
        took_s = time.monotonic() - begun_at
        say(f"{worker_id} is back as incarnation {now['incarnation'][:6]} after {took_s:.1f} s")
        return Progress(worker_id, incarnation, grace_s, round(gone_s, 3), round(took_s, 3), now["incarnation"])


async def _find(client: AsyncClient, worker_id: str) -> WorkerStatus:
    workers = (await client.topology())["workers"]
    for worker in workers:
        if worker["id"] == worker_id:
            return worker
    known = ", ".join(w["id"] for w in workers) or "none"
    raise NotFound(f"there is no worker {worker_id!r}; there are: {known}", field="worker")


async def _until_gone(client: AsyncClient, old: WorkerStatus, ends_at: float, say: Say) -> WorkerStatus | None:
    """Says what is left whenever that changes. Returns the worker's next incarnation if that is here already."""
    told = _left(old)
    while True:
        now = await _look(client, old["id"])
        if now is None or now["incarnation"] != old["incarnation"]:
            return now
        left = _left(now)
        if left != told:
            told = left
            say(f"{old['id']}: {left}")
        if time.monotonic() >= ends_at:
            raise DeadlineExceeded(f"{old['id']} is still here {LATE_S:g} s after its grace: {left}")
        await asyncio.sleep(POLL_S)


async def _until_back(client: AsyncClient, worker_id: str, ends_at: float) -> WorkerStatus | None:
    while time.monotonic() < ends_at:
        now = await _look(client, worker_id)
        if now is not None:
            return now
        await asyncio.sleep(POLL_S)
    return None


async def _look(client: AsyncClient, worker_id: str) -> WorkerStatus | None:
    for attempt in range(3):
        try:
            workers = (await client.topology())["workers"]
        except Unavailable:
            if attempt == 2:
                raise
            await asyncio.sleep(POLL_S)
        else:
            return next((w for w in workers if w["id"] == worker_id), None)
    return None


def _left(worker: WorkerStatus) -> str:
    sequences = worker["running"] + worker["waiting"]
    return f"{sequences} sequences and {worker['transfers_in_flight']} transfers left"
