"""Decode's end of its links: greets prefill workers, passes their messages to the engine. No protos, no block states.

One link per prefill incarnation. A link whose end comes from the other side is reported as closed by the peer's kernel:
a prefill worker closes its call only by ending (see worker.link_client), so that nothing of it can write any more when
the end of the stream is seen here. A link that we end says nothing about the peer. A writer that dials anew has lost
its older link, whose end may never be seen here if the line between the two failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import structlog

from kvrelay.blocks import KVLayout, require_same
from kvrelay.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument, LayoutMismatch
from kvrelay.link import LinkHello, LinkWelcome, ToDecode, ToPrefill
from kvrelay.requests import Incarnation
from kvrelay.session import PROTOCOL_VERSION
from worker.events import Event, FromPrefill, LinkClosed, LinkOpened
from worker.link_room import post_with_room
from worker.mailbox import Mailbox
from worker.patience import within

log = structlog.get_logger("worker.link")

HELLO_TIMEOUT_S = 5.0
MAX_UNREAD = 65_536
"""Messages to one prefill worker that may wait; they are small, and one more means that it reads nothing."""

WriteMessage = Callable[[ToPrefill], Awaitable[None]]


class _Link:
    """A link that is open as far as the engine knows. ended_here: by us, which its handler has yet to see."""

    def __init__(self, reader: asyncio.Future[None]) -> None:
        self.queue: asyncio.Queue[ToPrefill | None] = asyncio.Queue()
        self.reader = reader
        self.ended_here = False
        reader.add_done_callback(lambda _: self.queue.put_nowait(None))

    def end(self) -> None:
        self.ended_here = True
        self.queue.put_nowait(None)


class LinkServer:
    """All links of a decode worker, on its event loop. verify_kv: only writers that send checksums are welcome."""

    def __init__(
        self, mailbox: Mailbox[Event], welcome: LinkWelcome, model_fingerprint: str, verify_kv: bool = False
    ) -> None:
        self._mailbox = mailbox
        self._welcome = welcome
        self._fingerprint = model_fingerprint
        self._verify_kv = verify_kv
        self._links: dict[Incarnation, _Link] = {}

    def send(self, writer: Incarnation, message: ToPrefill) -> None:
        """Queue a message; dropped when that link is gone. A link whose queue overflows is ended."""
        link = self._links.get(writer)
        if link is None or link.ended_here:
            return
        if link.queue.qsize() >= MAX_UNREAD:
            log.error("link ended: the prefill worker reads nothing", incarnation=writer)
            link.end()
        else:
            link.queue.put_nowait(message)

    def end_all(self) -> None:
        for link in self._links.values():
            link.end()

    async def serve(self, messages: AsyncIterator[ToDecode], write: WriteMessage) -> None:
        """Run one link to its end. Raises FailedPrecondition or InvalidArgument when it cannot begin."""
        hello = await self._greet(messages)
        writer = hello.incarnation
        self._end_older(writer)
        link = self._links[writer] = _Link(asyncio.ensure_future(self._read(writer, messages)))
        reader = link.reader
        log.info("link opened", prefill=hello.worker_id, incarnation=writer)
        try:
            # First: a writer that is welcomed must no longer count as gone.
            self._mailbox.post(LinkOpened(writer))
            await write(self._welcome)
            while (message := await link.queue.get()) is not None:
                await write(message)
        finally:
            if self._links.get(writer) is link:
                del self._links[writer]
                refused = reader.done() and not reader.cancelled() and reader.exception() is not None
                self._mailbox.post(LinkClosed(writer, by_kernel=not (refused or link.ended_here)), must=True)
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            log.info("link closed", prefill=hello.worker_id, incarnation=writer)
        if not reader.cancelled() and (error := reader.exception()) is not None:
            raise error

    def _end_older(self, writer: Incarnation) -> None:
        """Its writer lives, and nothing that came over it is heard any more."""
        older = self._links.pop(writer, None)
        if older is not None:
            older.reader.cancel()
            older.end()
            self._mailbox.post(LinkClosed(writer, by_kernel=False), must=True)

    async def _greet(self, messages: AsyncIterator[ToDecode]) -> LinkHello:
        try:
            hello = await within(HELLO_TIMEOUT_S, anext(messages))
        except StopAsyncIteration:
            raise InvalidArgument("the link ended before hello", field="link.hello") from None
        except TimeoutError:
            raise DeadlineExceeded(f"no hello within {HELLO_TIMEOUT_S:.0f} s", field="link.hello") from None
        if not isinstance(hello, LinkHello):
            raise InvalidArgument("a link begins with hello", field="link.hello")
        check_hello(hello, self._welcome, self._fingerprint, self._verify_kv)
        return hello

    async def _read(self, writer: Incarnation, messages: AsyncIterator[ToDecode]) -> None:
        async for message in messages:
            if isinstance(message, LinkHello):
                raise InvalidArgument("hello was already said", field="link.hello")
            await post_with_room(self._mailbox, FromPrefill(writer, message), message)


def check_hello(hello: LinkHello, mine: LinkWelcome, fingerprint: str, verify_kv: bool = False) -> None:
    """Raise FailedPrecondition, naming the field and both values, unless the two workers pair."""
    if hello.decode_incarnation != mine.incarnation:
        raise FailedPrecondition(
            f"incarnation differs: {mine.incarnation} here, {hello.decode_incarnation} wanted", field="incarnation"
        )
    if verify_kv and not hello.verify_kv:
        raise FailedPrecondition(
            f"verify_kv differs: true here, false there: {hello.worker_id} sends no checksums", field="verify_kv"
        )
    pairs = {
        "protocol_version": (PROTOCOL_VERSION, hello.protocol_version),
        "model_fingerprint": (fingerprint, hello.model_fingerprint),
        "transport": (mine.transport, hello.transport),
    }
    for name, (here, there) in pairs.items():
        if here != there:
            raise LayoutMismatch(f"{name} differs: {here} here, {there} there", field=name)
    layout: KVLayout = mine.layout
    require_same(layout, hello.layout, "layout")
