"""A client's connection: uvicorn's protocol, which also tells when it is lost and can be cut. Knows no requests.

A server behind an ASGI interface hears of a hang-up only where it asks for it, with a task for each answer; here the
connection itself calls. A peer that is gone without a word is noticed by the kernel. One that closes its side has gone,
even if it would still read: most clients say no more when they give up, and an answer that nobody reads costs a GPU.
What the parser keeps until a request's headers are whole is bounded here, in bytes, in number and in time.
"""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from coordinator.http.errors import Rejected, error_body, meaning_of, retry_headers
from coordinator.http.framing import unframed
from kvrelay.errors import KVRelayError, Unavailable

EXTENSION = "kvrelay"
OURS = "connection"
SILENT_S = 30
"""A peer that acknowledges nothing for so long is gone."""
PROBE_S = 10
MAX_HEAD_BYTES = 64 * 1024
"""Of a request's first line and headers; also of what comes after them without being body, as trailers."""
MAX_HEADERS = 200
READ_BYTES = 32 * 1024
"""Taken from a client in one turn of the loop: a body in chunks of one byte costs 6 us for each of them."""
HEAD_S = 20.0
"""How long a request's headers may take to come; also the first one's of a new connection."""
LINGER_S = 1.0
"""How long what still comes after a refusal is thrown away: closing at once would take the refusal back as well."""
MAX_AHEAD = 8
MAX_AHEAD_BYTES = 64 * 1024
"""Of requests sent behind one that is still being answered. Up to there they are read, as a hang-up is noticed only by
reading; what goes beyond it waits until that answer is out."""
MAX_CONNECTIONS = 4096
"""At once. Half of the files that the process may have open, where that is less."""


class Connection(HttpToolsProtocol):
    """Each request of it carries it in its scope."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._told: list[Callable[[], None]] = []
        self._active: RequestResponseCycle | None = None
        self._refusal: KVRelayError | None = None
        self._is_over = False
        self._in_head = True
        self._has_moved = False
        self._num_waiting = self._num_ahead = 0
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in the base class
        super().connection_made(transport)
        transport.max_size = READ_BYTES  # type: ignore[attr-defined]  # of asyncio's transports over sockets
        sock = transport.get_extra_info("socket")
        with suppress(OSError, AttributeError):  # options that this kernel does not have
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_S * 1000)
        if len(self.connections) > most_connections():
            self._refuse(Unavailable("too many connections", retry_after_s=1.0))
            transport.close()
        else:
            self._await_head()

    def data_received(self, data: bytes) -> None:
        if self._is_over:
            return
        self._has_moved = False
        super().data_received(data)
        # Bytes that were neither the end of a head nor body are what the parser keeps.
        self._num_waiting = 0 if self._has_moved else self._num_waiting + len(data)
        if self._is_over:
            return
        self._read_ahead(len(data))
        if self._num_waiting > MAX_HEAD_BYTES:
            self._refuse(_too_large())
        elif self._in_head and self._num_waiting and self._head_timer is None:
            self._await_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {EXTENSION: {OURS: self}}

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > MAX_HEAD_BYTES:
            self._refusal = _too_large()
            raise self._refusal

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADERS:
            self._refusal = _too_large()
            raise self._refusal

    def on_headers_complete(self) -> None:
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > MAX_HEAD_BYTES:
            self._refusal = _too_large()
            raise self._refusal
        self._in_head, self._has_moved = False, True
        self._forget_head()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._has_moved = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_head = self._has_moved = True
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """What the parser could not take, or one of the callbacks above."""
        self._refuse(self._refusal or Rejected(400, "the request is not HTTP/1.1", "invalid_request"))

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._active = cycle
        if cycle.scope["http_version"] == "1.0":
            app = unframed(cycle, app)
        super()._start_asgi_task(cycle, app)

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_head()
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

    @property
    def _answers(self) -> bool:
        return self._active is not None and not self._active.response_complete

    def _read_ahead(self, num_bytes: int) -> None:
        """uvicorn stops reading at the first request that has to wait for another one's answer."""
        self._num_ahead = self._num_ahead + num_bytes if self.pipeline else 0
        if self.pipeline and len(self.pipeline) <= MAX_AHEAD and self._num_ahead <= MAX_AHEAD_BYTES:
            self.flow.resume_reading()

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_S, self._head_is_late)

    def _forget_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self._answers:  # its next request may take as long as this one's answer
            self._await_head()
        elif self._num_waiting:
            words = f"the headers did not come within {HEAD_S:g} s"
            self._refuse(Rejected(408, words, "request_timeout"))
        elif self.timeout_keep_alive_task is None:
            self.transport.close()

    def _refuse(self, error: KVRelayError) -> None:
        """Says so, where no other answer is being written or was written already, and closes."""
        self._is_over = True
        if self._answers or not self._in_head:
            self.transport.close()
        else:
            body = error_body(error).encode()
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", b"%d" % len(body)),
                (b"connection", b"close"),
                *retry_headers(error),
            ]
            lines = b"".join(b"%s: %s\r\n" % header for header in headers)
            self.transport.write(STATUS_LINE[meaning_of(error).status] + lines + b"\r\n" + body)
            self.transport.write_eof()
            self.loop.call_later(LINGER_S, self.transport.close)


def most_connections() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, soft // 2)


def connection_of(scope: Scope) -> Connection:
    connection: Connection = scope["extensions"][EXTENSION][OURS]
    return connection


def _too_large() -> Rejected:
    words = f"the request line and headers are more than {MAX_HEAD_BYTES} bytes or {MAX_HEADERS} headers"
    return Rejected(431, words, "headers_too_large")
