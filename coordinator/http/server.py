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
"""How long connections may take to close once all answers are out."""


class HttpServer:
    def __init__(self, door: Door) -> None:
        self._door = door
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
                timeout_graceful_shutdown=CLOSE_S,  # type: ignore[arg-type]  # waits with asyncio, for fractions too
            )
        )
        self._ticking: asyncio.Task[None] | None = None

    async def start(self, address: str) -> str:
        """Serves on HOST:PORT; returns it with the real port. FailedPrecondition names an address it cannot have."""
        listening = listen(address)
        config = self._server.config
        config.load()
        self._server.lifespan = config.lifespan_class(config)
        await self._server.startup([listening])
        self._ticking = asyncio.create_task(self._server.main_loop(), name="http")
        return f"{parse_address(address)[0]}:{listening.getsockname()[1]}"

    async def stop(self, within_s: float) -> None:
        """New requests are refused, open ones have so long; then connections are closed."""
        if self._ticking is None:
            return
        self._door.draining = True
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._door.wait_idle()
        self._server.should_exit = True
        await self._ticking
        await self._server.shutdown()
        self._ticking = None


def listen(address: str) -> socket.socket:
    """A socket that listens; a port in use is an error, not shared."""
    host, port = parse_address(address)
    try:
        (family, *_, where), *_ = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
        return socket.create_server(where[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        words = f"cannot serve HTTP on {address}: {error.strerror or error}"
        raise FailedPrecondition(words, field="http") from error
