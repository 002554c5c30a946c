"""A client's connection: uvicorn's protocol, which also tells when it is lost and can be cut. Knows no requests.

A server behind an ASGI interface hears of a hang-up only where it asks for it, with a task for each answer; here the
connection itself calls. A peer that is gone without a word is noticed by the kernel.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

EXTENSION = "kvrelay"
OURS = "connection"
SILENT_S = 30
"""A peer that acknowledges nothing for so long is gone."""
PROBE_S = 10


class Connection(HttpToolsProtocol):
    """Each request of it carries it in its scope."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._told: list[Callable[[], None]] = []
        self._active: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in the base class
        super().connection_made(transport)
        sock = transport.get_extra_info("socket")
        with suppress(OSError, AttributeError):  # options that this kernel does not have
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_S * 1000)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {EXTENSION: {OURS: self}}

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._active = cycle
        super()._start_asgi_task(cycle, app)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._active is not None and not self._active.response_complete:
            # The base class marks the newest request, which is another one where a client sent two at once.
            self._active.disconnected = True
            self._active.message_event.set()
        for tell in list(self._told):
            tell()

    @contextmanager
    def when_lost(self, tell: Callable[[], None]) -> Iterator[None]:
        """Inside the block, `tell` is called once the connection is lost; at once if it is lost already."""
        self._told.append(tell)
        if self._active is not None and self._active.disconnected:
            tell()
        try:
            yield
        finally:
            self._told.remove(tell)

    def abort(self) -> None:
        """Drops it with what was not yet sent."""
        self.transport.abort()


def connection_of(scope: Scope) -> Connection:
    connection: Connection = scope["extensions"][EXTENSION][OURS]
    return connection
