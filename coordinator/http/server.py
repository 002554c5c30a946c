"""uvicorn inside the coordinator's event loop: binds, serves, ends. Knows no routes.

It installs no signal handlers, logs no accesses and owns no loop; the coordinator says when it ends.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress

import uvicorn

from coordinator.http.app import build_app
from coordinator.http.connection import Connection
from coordinator.http.door import Door
from kvrelay.config_load import parse_address
from kvrelay.errors import FailedPrecondition

BACKLOG = 2048
KEEP_ALIVE_S = 75
"""Longer than clients keep an idle connection, so that they are the ones who close it."""
CLOSE_S = 1.0
"""How long what is still running may take once the time for it is over."""
SEND_BUFFER = 256 * 1024
"""Of the kernel, for each client: what one does not read waits here, where it is counted, and not there."""


class HttpServer:
    """address: HOST:PORT with the real port, once it serves."""

    def __init__(self, door: Door) -> None:
        self.door = door
        self.address = ""
        self._server = uvicorn.Server(
            uvicorn.Config(
                build_app(door),
                http=Connection,
                ws="none",
                loop="none",
                interface="asgi3",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                reset_contextvars=True,
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_S,
            )
        )
        self._ticking: asyncio.Task[None] | None = None

    async def start(self, address: str) -> None:
        """Serves on HOST:PORT, port 0 being a free one. FailedPrecondition names an address it cannot have."""
        listening = listen(address)
        config = self._server.config
        config.load()
        self._server.lifespan = config.lifespan_class(config)
        await self._server.startup([listening])
        self._ticking = asyncio.create_task(self._server.main_loop(), name="http")
        self.address = f"{parse_address(address)[0]}:{listening.getsockname()[1]}"

    async def stop(self, within_s: float) -> None:
        """New requests are refused, open ones have so long; then connections are closed."""
        if self._ticking is None:
            return
        self.door.draining = True
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self.door.wait_idle()
        self._ticking.cancel()
        self._ticking = None
        await self._close()

    async def _close(self) -> None:
        """Idle connections at once, others once their answer is out, or after CLOSE_S."""
        for server in self._server.servers:
            server.close()
        connections, tasks = self._server.server_state.connections, self._server.server_state.tasks
        for connection in list(connections):
            connection.shutdown()
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_S)
        for connection in list(connections):
            connection.transport.abort()
        if tasks:  # their clients have gone now
            await asyncio.wait(tasks, timeout=CLOSE_S)


def listen(address: str) -> socket.socket:
    """A socket that listens; a port in use is an error, not shared."""
    host, port = parse_address(address)
    try:
        (family, *_, where), *_ = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
        listening = socket.create_server(where[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        words = f"cannot serve HTTP on {address}: {error.strerror or error}"
        raise FailedPrecondition(words, field="http") from error
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
    return listening
