"""Prefill's end of its links: one call per decode incarnation, dialled when first needed. No block states here.

A link is closed by hand only when this process is about to end and its transport has been closed: its end tells the
decode worker that nothing from here can write any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Protocol

import structlog

from kvrelay.errors import FailedPrecondition, Internal, KVRelayError, Unavailable
from kvrelay.link import LinkHello, LinkWelcome, ToDecode, ToPrefill
from kvrelay.requests import Incarnation
from worker.events import Event, FromDecode, LinkClosed, LinkOpened, OpenLink
from worker.link_room import post_with_room
from worker.mailbox import Mailbox
from worker.patience import within

log = structlog.get_logger("worker.link")

WELCOME_TIMEOUT_S = 5.0
REFUSED = "Connection refused"
"""What gRPC says when nobody listens at an address."""
MAX_QUEUED = 64
"""Messages on their way to one decode worker; bulk senders wait for room, control messages go past the bound."""
MAX_UNREAD = 65_536
"""Control messages that may wait all the same: one more, and a decode worker that reads nothing was not ended in time.
The link may not be closed for it (that would say that this process is dead), so the process ends."""


class LinkCall(Protocol):
    """An open stream to a decode worker, in the words of kvrelay.link."""

    async def write(self, message: ToDecode) -> None: ...

    def messages(self) -> AsyncIterator[ToPrefill]: ...


Dial = Callable[[str], AbstractAsyncContextManager[LinkCall]]


class _Link:
    def __init__(self) -> None:
        self.queue: asyncio.Queue[ToDecode] = asyncio.Queue()
        self.room = asyncio.Event()
        self.room.set()
        self.closed = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    def put(self, message: ToDecode) -> None:
        """Internal, which ends the process, when the peer reads nothing."""
        if self.queue.qsize() >= MAX_UNREAD:
            raise Internal(f"{MAX_UNREAD} messages wait for one decode worker")
        self.queue.put_nowait(message)
        if self.queue.qsize() >= MAX_QUEUED:
            self.room.clear()

    async def take(self) -> ToDecode:
        message = await self.queue.get()
        if self.queue.qsize() < MAX_QUEUED // 2:
            self.room.set()
        return message


class LinkClient:
    """All links of a prefill worker, on its event loop. `add_peer` tells the transport where the peer's pool lies."""

    def __init__(
        self,
        mailbox: Mailbox[Event],
        hello: LinkHello,
        dial: Dial,
        add_peer: Callable[[LinkWelcome], Awaitable[None]],
    ) -> None:
        self._mailbox = mailbox
        self._hello = hello
        self._dial = dial
        self._add_peer = add_peer
        self._links: dict[Incarnation, _Link] = {}

    def ensure(self, target: OpenLink) -> None:
        """Dial unless there is a link to this incarnation already. Its end, at any stage, is posted as LinkClosed."""
        if target.peer in self._links:
            return
        link = _Link()
        self._links[target.peer] = link
        link.task = asyncio.ensure_future(self._run(target, link))

    def send(self, peer: Incarnation, message: ToDecode) -> None:
        """Queue a control message; dropped when that link is gone."""
        link = self._links.get(peer)
        if link is not None:
            link.put(message)

    async def send_bulk(self, peer: Incarnation, message: ToDecode) -> None:
        """Queue a message once there is room. Raises Unavailable when that link is gone."""
        link = self._links.get(peer)
        while link is not None and not link.room.is_set() and not link.closed.is_set():
            waits = [asyncio.ensure_future(link.room.wait()), asyncio.ensure_future(link.closed.wait())]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
        if link is None or link.closed.is_set():
            raise Unavailable(f"the link to {peer} is gone")
        link.put(message)

    def let_go(self, peer: Incarnation, drop: Callable[[Incarnation], None]) -> None:
        """Have the transport drop a peer that no hand-off needs, unless a link to it is there, or on its way.

        A link that comes up has added the peer before it says so: dropped then, it would be written to in vain for as
        long as the link lasts. Its end, which is posted, is the next occasion.
        """
        if peer not in self._links:
            drop(peer)

    async def close(self) -> None:
        """End all links. Only after the transport was closed, and on the way out."""
        tasks = [link.task for link in self._links.values() if link.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, target: OpenLink, link: _Link) -> None:
        reason, peer_dead = "ended by the decode worker", False
        try:
            async with self._dial(target.address) as call:
                await self._talk(target, link, call)
        except KVRelayError as error:
            reason = error.message
            peer_dead = error.field == "incarnation" or REFUSED in error.message
        except TimeoutError:
            reason = f"no welcome within {WELCOME_TIMEOUT_S:.0f} s"
        except asyncio.CancelledError:
            reason = "this worker is ending"
        except Exception as error:  # a bug of ours, or of the transport's: it ends this link, and is said
            log.exception("link failed", decode=target.worker_id)
            reason = f"{type(error).__name__}: {error}"
        finally:
            link.closed.set()
            self._links.pop(target.peer, None)
            self._mailbox.post(LinkClosed(target.peer, False, reason, peer_dead), must=True)
            log.info("link closed", decode=target.worker_id, incarnation=target.peer, why=reason)

    async def _talk(self, target: OpenLink, link: _Link, call: LinkCall) -> None:
        await call.write(replace(self._hello, decode_incarnation=target.peer))
        messages = call.messages()
        try:
            welcome = await within(WELCOME_TIMEOUT_S, anext(messages))
        except StopAsyncIteration:
            raise Unavailable(f"{target.worker_id} closed the link before its welcome") from None
        self._check(target, welcome)
        assert isinstance(welcome, LinkWelcome)
        await self._add_peer(welcome)
        self._mailbox.post(LinkOpened(target.peer))
        log.info("link opened", decode=target.worker_id, incarnation=target.peer, transport=welcome.transport)
        writer = asyncio.ensure_future(self._write(link, call))
        reader = asyncio.ensure_future(self._read(target.peer, messages))
        try:
            await asyncio.wait([writer, reader], return_when=asyncio.FIRST_COMPLETED)
        finally:
            writer.cancel()
            reader.cancel()
            results = await asyncio.gather(writer, reader, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result

    def _check(self, target: OpenLink, welcome: ToPrefill) -> None:
        if not isinstance(welcome, LinkWelcome):
            raise FailedPrecondition("a decode worker's first message must be a welcome", field="link.welcome")
        if welcome.incarnation != target.peer:
            raise FailedPrecondition(
                f"incarnation differs: {target.peer} wanted, {welcome.incarnation} there", field="incarnation"
            )
        for name in ("layout", "transport"):
            if getattr(welcome, name) != getattr(self._hello, name):
                raise FailedPrecondition(f"the welcome's {name} is not the one agreed on", field=name)

    @staticmethod
    async def _write(link: _Link, call: LinkCall) -> None:
        while True:
            await call.write(await link.take())

    async def _read(self, peer: Incarnation, messages: AsyncIterator[ToPrefill]) -> None:
        async for message in messages:
            if isinstance(message, LinkWelcome):
                raise FailedPrecondition("welcome was already said", field="link.welcome")
            await post_with_room(self._mailbox, FromDecode(peer, message), message)
