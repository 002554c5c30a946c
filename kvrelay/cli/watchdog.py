"""Kills a process of a local cluster that is silent or unwell, so that its supervisor starts it again. Knows no roles.

A process that hangs or stands still keeps its connections open, and with them the blocks that it may still write to;
its death is what sets them free. So does one that says itself that nothing moves (NOT_SERVING), but for its event loop:
it had 10 s to say so and gets as many again. All of it counts only while our own timer was on time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvrelay.cli.cluster import Reached
from kvrelay.cli.members import reachable
from kvrelay.liveness import Liveness
from kvrelay.rpc.channel import open_channel

CHECK_S = 1.0
SILENT_S = 10.0


Members = Callable[[], Mapping[str, Reached]]


async def watch(members: Members, kill: Callable[[str, int], None], silent_s: float = SILENT_S) -> None:
    """Runs until cancelled. kill(name, pid) is called for a process that did not say for silent_s that it is well."""
    watched: dict[Reached, asyncio.Task[None]] = {}
    try:
        while True:
            for task in watched.values():
                if task.done():
                    task.result()
            present = {reached: name for name, reached in members().items()}
            for gone in watched.keys() - present.keys():
                watched.pop(gone).cancel()
            for new in present.keys() - watched.keys():
                watched[new] = asyncio.create_task(_watch_one(present[new], new, kill, silent_s))
            await asyncio.sleep(CHECK_S)
    finally:
        for task in watched.values():
            task.cancel()
        await asyncio.gather(*watched.values(), return_exceptions=True)


async def _watch_one(name: str, reached: Reached, kill: Callable[[str, int], None], silent_s: float) -> None:
    async with open_channel(reachable(reached.address)) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        state = Liveness.start(silent_s, time.monotonic())
        while True:
            began = time.monotonic()
            with suppress(grpc.RpcError):
                answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=CHECK_S)
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    state = state.heard(time.monotonic())
            await asyncio.sleep(max(0.0, CHECK_S - (time.monotonic() - began)))
            state, gone = state.check(time.monotonic(), CHECK_S)
            if gone:
                kill(name, reached.pid)
                return
