"""When the transport of a prefill worker forgets a decode worker: never under a link that is there or on its way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from support.greetings import HELLO, WELCOME, D

from kvrelay.errors import Unavailable
from kvrelay.link import LinkWelcome, ToDecode, ToPrefill
from kvrelay.requests import Incarnation, WorkerId
from prefill_svc.peers import Peers
from worker.events import DropPeer, Event, LinkClosed, LinkOpened, OpenLink
from worker.link_client import LinkClient
from worker.mailbox import Mailbox

TARGET = OpenLink(D, WorkerId("d"), "host:1")


class Prefill:
    """Links, what decides about peers, and which of them the transport knows; the engine looks when a test says so."""

    def __init__(self) -> None:
        self.mailbox: Mailbox[Event] = Mailbox()
        self.client = LinkClient(self.mailbox, HELLO, self._dial, self._add)
        self.busy = True
        self.peers = Peers(lambda _: self.busy)
        self.known: set[Incarnation] = set()
        self.wire: asyncio.Queue[ToPrefill | None] = asyncio.Queue()
        """What decode says over the link; None: it is cut."""
        self.added, self.back = asyncio.Event(), asyncio.Event()
        """The transport has added the peer; and it has been heard of on the event loop."""
        self.back.set()

    @asynccontextmanager
    async def _dial(self, address: str) -> AsyncIterator[Prefill]:
        yield self

    async def write(self, message: ToDecode) -> None: ...

    async def messages(self) -> AsyncIterator[ToPrefill]:
        while (message := await self.wire.get()) is not None:
            yield message
        raise Unavailable("the link was cut")

    async def _add(self, welcome: LinkWelcome) -> None:
        self.known.add(welcome.incarnation)
        self.added.set()
        await self.back.wait()

    def do(self, *actions: OpenLink | DropPeer) -> None:
        for action in actions:
            if isinstance(action, OpenLink):
                self.client.ensure(action)
            else:
                self.client.let_go(action.peer, self.known.discard)

    def look(self, events: list[Event]) -> None:
        """A turn of the engine that has taken these events, and no others yet."""
        for event in events:
            if isinstance(event, LinkOpened):
                self.peers.linked(event.peer)
            elif isinstance(event, LinkClosed):
                self.peers.lost(event.peer, 1.0)
        self.do(*self.peers.due(1.0))

    async def heard(self) -> list[Event]:
        events: list[Event] = []
        async with asyncio.timeout(5):
            while not events:
                events += self.mailbox.take(0)
                await asyncio.sleep(0)
        return events


async def with_a_second_link_on_its_way() -> Prefill:
    """The first one was cut while a hand-off had not ended, so that decode is dialled again and has welcomed us."""
    prefill = Prefill()
    prefill.do(prefill.peers.want(TARGET))
    prefill.wire.put_nowait(WELCOME)
    prefill.look(await prefill.heard())
    prefill.wire.put_nowait(None)
    events = await prefill.heard()
    prefill.added.clear()
    prefill.back.clear()
    prefill.look(events)
    prefill.wire.put_nowait(WELCOME)
    async with asyncio.timeout(5):
        await prefill.added.wait()
    return prefill


async def test_a_hand_off_that_ends_while_a_new_link_comes_up_leaves_the_transport_the_peer() -> None:
    """Without it each later hand-off over that link would fail: nobody adds the peer again while it lasts."""
    prefill = await with_a_second_link_on_its_way()
    prefill.busy = False
    prefill.look([])
    prefill.back.set()
    prefill.look(await prefill.heard())
    assert prefill.known == {D}
    prefill.do(prefill.peers.want(TARGET))
    assert prefill.known == {D}
    await prefill.client.close()


async def test_the_end_of_such_a_link_is_when_the_peer_is_forgotten() -> None:
    prefill = await with_a_second_link_on_its_way()
    prefill.busy = False
    prefill.look([])
    prefill.back.set()
    prefill.wire.put_nowait(None)
    events: list[Event] = []
    while not any(isinstance(event, LinkClosed) for event in events):
        events += await prefill.heard()
    prefill.look(events)
    assert prefill.known == set()
    await prefill.client.close()
