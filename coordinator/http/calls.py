"""One POST of one client: its headers, its body within limits, one answer or one error, and its hang-up at any moment.

Knows no request of ours. A client that goes cancels the task that works for it, whatever it waits for.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from opentelemetry.trace import Span
from starlette.types import Message, Receive, Scope, Send

from coordinator.http.connection import connection_of
from coordinator.http.counting import Counting
from coordinator.http.door import Door
from coordinator.http.errors import Headers, Rejected, error_body, meaning_of, retry_headers
from coordinator.http.tracing import end_span
from kvrelay.errors import Cancelled, DeadlineExceeded, InvalidArgument, KVRelayError
from kvrelay.rpc.status import as_error
from kvrelay.telemetry import calls

BODY_S = 60.0
"""How long a body may take to come."""
READ_S = 60.0
"""How long a client may take to read enough of a whole answer for its next part to go out, or for the last event."""
PART_BYTES = 128 * 1024
"""Of an answer, written in one turn of the loop."""
TIMEOUT_HEADER = "x-request-timeout"
"""Seconds from the first byte to the last; the deadline of a gRPC call."""
JSON = (b"content-type", b"application/json")
EVENTS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class ClientGone(Exception):
    """It hung up while its body was being read."""


class CutOff(Exception):
    """The reader was given up while a write to it was stuck: nothing can be said to it any more."""


class Call:
    """What a handler works with. names: what this body calls some fields, see errors.param_of."""

    def __init__(self, door: Door, scope: Scope, receive: Receive, send: Send) -> None:
        self.door = door
        self.accepted_at, self.accepted_ns = time.monotonic(), time.time_ns()
        self.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        self.ids = calls.begin(self.headers.get(calls.LABEL_HEADER, ""))
        self.names: Mapping[str, str] = {}
        self.spans: list[Span] = []
        self.status = 0
        self._scope, self._receive, self._send = scope, receive, send
        self._started = self._is_gone = False

    async def run(self, work: Callable[[Call], Awaitable[None]]) -> None:
        """Does the work; whatever goes wrong is said to the client, if it is still there."""
        try:
            with self.door.running(), self._noticing_hang_up():
                self.another_span()
                await self._guarded(work)
        except ClientGone:
            self.status = self.status or meaning_of(Cancelled("")).status
        except CutOff:
            self.status = 429
            connection_of(self._scope).abort()
        finally:
            for span in self.spans:
                end_span(span, self.status or 500)

    def another_span(self) -> Span:
        """Of one more request of this call: each has a trace of its own below it."""
        span = self.door.tracing.start(self._scope["method"], self._scope["path"], self.headers, self.ids)
        self.spans.append(span)
        return span

    @property
    def deadline_at(self) -> float | None:
        """On the clock of accepted_at. InvalidArgument for a header that is no number above 0."""
        text = self.headers.get(TIMEOUT_HEADER)
        if text is None:
            return None
        try:
            seconds = float(text)
        except ValueError:
            seconds = math.nan
        if not (math.isfinite(seconds) and seconds > 0):
            raise InvalidArgument(
                f"{TIMEOUT_HEADER}: must be seconds, above 0, not {text[:40]!r}", field=TIMEOUT_HEADER
            )
        return self.accepted_at + seconds

    @asynccontextmanager
    async def in_time(self) -> AsyncIterator[None]:
        """DeadlineExceeded once the caller's deadline passes in the block, which ends it.

        For what goes on before a request is taken in: from then on the dispatcher keeps its deadline.
        """
        try:
            async with asyncio.timeout_at(self.deadline_at):
                yield
        except TimeoutError:
            raise DeadlineExceeded("the deadline passed before the request was taken in") from None

    async def body(self) -> bytearray:
        """The whole body. Rejected: too large, packed, or too slow; Unavailable: too much comes at once;
        DeadlineExceeded."""
        limit, said = self.door.max_body_bytes, self.headers.get("content-length", "0")
        if self.headers.get("content-encoding", "identity") != "identity":
            raise Rejected(415, "content-encoding: only identity is supported", "unsupported_encoding")
        if said.isdigit() and int(said) > limit:
            raise _too_large(limit)
        async with self.in_time():
            return await self._body(limit)

    async def _body(self, limit: int) -> bytearray:
        body, counting, num_counted = bytearray(), Counting(), 0
        try:
            async with asyncio.timeout(BODY_S):
                while True:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    part = message.get("body", b"")
                    body += part
                    if len(body) > limit:
                        raise _too_large(limit)
                    self.door.coming(len(part))
                    num_counted += len(part)
                    counting.feed(part)
                    if not message.get("more_body"):
                        return body
        except TimeoutError:
            raise Rejected(408, f"the body did not come within {BODY_S:g} s", "request_timeout") from None
        finally:
            self.door.come(num_counted)

    async def answer(self, value: Any) -> None:
        """The whole answer as JSON."""
        await self.answer_text(json.dumps(value))

    async def answer_text(self, text: str) -> None:
        """The whole answer, which is JSON already."""
        await self._whole(200, [text.encode()], [])

    async def answer_pieces(self, pieces: Iterator[str]) -> None:
        """The whole answer, whose JSON is made piece by piece: other calls get their turns between them."""
        made, size = [], 0
        for piece in pieces:
            made.append(piece.encode())
            size += len(piece)
            if size >= PART_BYTES:
                size = 0
                await asyncio.sleep(0)
        await self._whole(200, made, [])

    async def event(self, data: bytes) -> None:
        """A part of a stream of events, which begins with the first of them."""
        if not self._started:
            await self._start(200, EVENTS)
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def last_event(self, data: bytes) -> None:
        """CutOff if the client does not read it."""
        await self._send_part(data, False)

    async def _guarded(self, work: Callable[[Call], Awaitable[None]]) -> None:
        try:
            self.door.admit()
            self.ids.check()
            await work(self)
        except (ClientGone, CutOff):
            raise
        except Exception as error:
            await self._fail(as_error(error))

    async def _fail(self, error: KVRelayError) -> None:
        """As the answer's status; inside a stream as its last event."""
        body = error_body(error, self.names)
        if self._started:
            self.status = meaning_of(error).status
            await self.last_event(f"data: {body}\n\n".encode())
        else:
            await self._whole(meaning_of(error).status, [body.encode()], retry_headers(error))

    async def _whole(self, status: int, pieces: Sequence[bytes], headers: Headers) -> None:
        """A long one goes in parts, with turns for others between them. CutOff if the client does not read it."""
        length = sum(map(len, pieces))
        await self._start(status, [JSON, (b"content-length", b"%d" % length), *headers])
        for piece in pieces:
            for start in range(0, len(piece), PART_BYTES):
                part = piece[start : start + PART_BYTES]
                length -= len(part)
                await self._send_part(part, bool(length))

    async def _send_in_time(self, message: Message) -> None:
        """Of what no stream watches over, also the head of an answer behind one that was not read."""
        try:
            async with asyncio.timeout(READ_S):
                await self._send(message)
        except TimeoutError:
            raise CutOff from None

    async def _send_part(self, part: bytes, more: bool) -> None:
        await self._send_in_time({"type": "http.response.body", "body": part, "more_body": more})
        if more and len(part) == PART_BYTES:
            await asyncio.sleep(0)

    async def _start(self, status: int, headers: Headers) -> None:
        self._started, self.status = True, status
        said = [(name, value) for name, value in self.ids.metadata if value.isprintable()]
        ids = [(name.encode(), value.encode("latin-1")) for name, value in said]
        if not any(name == calls.LABEL_HEADER for name, _ in said):
            ids.append((calls.LABEL_HEADER.encode(), self.ids.request_id.encode()))
        await self._send_in_time({"type": "http.response.start", "status": status, "headers": [*headers, *ids]})

    @contextmanager
    def _noticing_hang_up(self) -> Iterator[None]:
        task = asyncio.current_task()
        assert task is not None, "a handler runs in a task"

        def gone() -> None:
            self._is_gone = True
            task.cancel()

        with connection_of(self._scope).when_lost(gone):
            try:
                yield
            except asyncio.CancelledError:
                if not self._is_gone:
                    raise
                task.uncancel()
                raise ClientGone from None


def _too_large(limit: int) -> Rejected:
    return Rejected(413, f"the body has more than {limit} bytes", "request_too_large")
