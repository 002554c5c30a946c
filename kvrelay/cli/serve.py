"""Brings a local cluster up, runs something on it, and takes it down on every way out.

1. Start all members; wait for the coordinator's `ready` line, then until all workers are registered.
2. Run the body (for `up`: print the ready line and wait; for `demo`: one request).
3. A stop signal, a failure that restarting cannot cure, or the body's end stops every process.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from kvrelay.cli.cluster import Cluster
from kvrelay.cli.members import LocalPlan, reachable
from kvrelay.cli.problems import EXIT_FAILED
from kvrelay.cli.screen import Screen
from kvrelay.errors import KVRelayError

if TYPE_CHECKING:
    from kvrelay.client import AsyncClient

POLL_S = 0.1
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Body = Callable[[str, Cluster], Coroutine[Any, Any, int]]


async def serve(plan: LocalPlan, screen: Screen, body: Body) -> int:
    """Exit code: the body's, 0 after a stop signal, the failure's where the cluster cannot serve."""
    cluster = Cluster(plan.members, screen.log, screen.say)
    stop = _stop_on_signals(cluster)
    await cluster.start()
    try:
        ready = await _first(_until_serving(plan, cluster), stop, cluster, plan.up.ready_timeout_s)
        if ready is None:
            return 0
        cluster.served = True
        code = await _first(body(reachable(plan.target), cluster), stop, cluster, None)
        return 0 if code is None else code
    except _Failed as failed:
        screen.say(failed.message)
        return failed.code
    finally:
        await cluster.stop(plan.stop_grace_s)


class _Failed(Exception):
    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


async def _first(
    work: Coroutine[Any, Any, int], stop: asyncio.Event, cluster: Cluster, timeout_s: float | None
) -> int | None:
    """Result of `work`; None when a stop was asked for first. _Failed when the cluster failed or time ran out."""
    task, stopped = asyncio.create_task(work), asyncio.create_task(stop.wait())
    watched: set[asyncio.Future[Any]] = {task, stopped, cluster.failure}
    try:
        await asyncio.wait(watched, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if cluster.failure.done():
            failure = cluster.failure.result()
            raise _Failed(failure.code, failure.message)
        if stopped.done():
            return None
        raise _Failed(EXIT_FAILED, f"not serving after {timeout_s:g} s; see the lines above")
    finally:
        for pending in (task, stopped):
            pending.cancel()
        await asyncio.gather(task, stopped, return_exceptions=True)


async def _until_serving(plan: LocalPlan, cluster: Cluster) -> int:
    """Returns 0 once every worker is registered and heard. The caller bounds it."""
    from kvrelay.client import AsyncClient  # while the members start, not before

    await cluster.until_ready("coordinator")
    async with AsyncClient(reachable(plan.target)) as client:
        while True:
            if await _num_workers(client) >= plan.num_workers:
                return 0
            await asyncio.sleep(POLL_S)


async def _num_workers(client: AsyncClient) -> int:
    try:
        return len((await client.topology())["workers"])
    except KVRelayError:
        return 0


def _stop_on_signals(cluster: Cluster) -> asyncio.Event:
    """Set by the first stop signal; a second one kills the members at once."""
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            cluster.kill()
        stop.set()

    for number in STOP_SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    return stop
