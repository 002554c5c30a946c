"""What the coordinator's gRPC health says beyond its own services: whether each role has a worker. Knows no requests.

The names stand for roles of the whole cluster, not for services of this process: `kvrelay.prefill`, `kvrelay.decode`.
"""

from __future__ import annotations

import asyncio

import structlog

from coordinator.roster import Roster
from kvrelay.requests import Role
from kvrelay.rpc.server import RpcServer

log = structlog.get_logger("coordinator")

CHECK_S = 0.2


def health_name(role: Role) -> str:
    """SERVING under this name: a worker of the role takes requests now."""
    return f"kvrelay.{role.value}"


class Readiness:
    """front: the service that is ready once a decode worker has a session, as it can do everything."""

    def __init__(self, server: RpcServer, roster: Roster, front: str) -> None:
        self._server = server
        self._roster = roster
        self._front = front
        self._said: dict[str, bool] = {}

    async def start(self) -> None:
        """Once the server has started: its other services are ready at once."""
        for name in self._server.services:
            if name != self._front:
                await self._server.set_ready(True, name)
        for name, ready in self._now().items():
            self._said[name] = ready
            await self._server.set_ready(ready, name)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            for name, ready in self._now().items():
                if self._said[name] != ready:
                    self._said[name] = ready
                    await self._server.set_ready(ready, name)
                    log.info("ready" if ready else "not ready", service=name)
            await asyncio.sleep(CHECK_S)

    def _now(self) -> dict[str, bool]:
        roles = {health_name(role): self._roster.is_usable(role) for role in Role}
        return {self._front: self._roster.has(Role.DECODE), **roles}
