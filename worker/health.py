"""How a worker is: well while something moves or there is nothing to do. Said by gRPC health; decides nothing else.

Stuck means that for STUCK_S the engine's thread did not come round, or the transport's, without which no hand-off lands
or ends, or that nothing moved although there was work.
Then readiness and liveness are NOT_SERVING, and coordinators hear of it with each load: they place nothing there, and
move what is there if it lasts. `kvrelay up` kills a worker for which it lasts. A busy one is not stuck.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

import structlog

from kvrelay.fault_points import fault_point
from kvrelay.liveness import Liveness
from kvrelay.rpc.server import RpcServer

log = structlog.get_logger("worker.health")

CHECK_S = 0.5
STUCK_S = 9.0
"""With CHECK_S and an idle engine's turns below the 10 s after which a worker must not be called healthy."""
LIVENESS = ""
"""The name under which gRPC health tells how the whole process is."""


class Turning(Protocol):
    """What is looked at: as of the engine's last turn, written by its thread."""

    progress_at: float
    stuck_s: float


async def watch(
    engine: Turning,
    server: RpcServer,
    leaving: Callable[[], bool] = lambda: False,
    changed: Callable[[bool], None] = lambda healthy: None,
    transport_hangs_s: Callable[[], float] = lambda: 0.0,
) -> None:
    """Until cancelled. Our own pauses, in which the engine stood still too, do not count.

    changed: told how it is now, whenever that changes. transport_hangs_s: how long its thread has not come round.
    """
    turns = rounds = Liveness.start(STUCK_S, time.monotonic())
    healthy = True
    while True:
        await asyncio.sleep(CHECK_S)
        fault_point("worker.watch")
        turns = turns.heard(max(turns.heard_at, engine.progress_at))
        turns, hangs = turns.check(time.monotonic(), CHECK_S)
        rounds = rounds.heard(max(rounds.heard_at, time.monotonic() - transport_hangs_s()))
        rounds, transport_hangs = rounds.check(time.monotonic(), CHECK_S)
        now_healthy = not hangs and not transport_hangs and engine.stuck_s < STUCK_S
        if now_healthy != healthy:
            healthy = now_healthy
            changed(healthy)
            log.warning(
                "health changed",
                healthy=healthy,
                engine_hangs=hangs,
                transport_hangs=transport_hangs,
                nothing_moved_s=round(engine.stuck_s, 1),
            )
            await server.set_ready(healthy and not leaving())
            await server.set_ready(healthy, LIVENESS)
