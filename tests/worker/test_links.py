"""Both ends of a link over an in-process pipe: greetings, mismatches, order, room, endings."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from support.greetings import HELLO, LAYOUT, WELCOME, D, P

from kvrelay.errors import FailedPrecondition, InvalidArgument, Unavailable
from kvrelay.link import (
    BlockData,
    LandedNotice,
    LinkWelcome,
    Opened,
    Renew,
    ToDecode,
    ToPrefill,
)
from kvrelay.requests import Incarnation, WorkerId
from worker import link_server
from worker.events import Event, FromDecode, FromPrefill, LinkClosed, LinkOpened, OpenLink
from worker.link_client import MAX_QUEUED, LinkClient
from worker.link_server import LinkServer, check_hello
from worker.mailbox import Mailbox


class Pipe:
    """A call between a LinkClient and a LinkServer; `cut` ends it like a lost connection."""

    def __init__(self, server: LinkServer) -> None:
        self.up: asyncio.Queue[ToDecode | None] = asyncio.Queue()
        self.down: asyncio.Queue[ToPrefill | BaseException | None] = asyncio.Queue()
        self.let_through = asyncio.Event()
        self.let_through.set()
        self.task = asyncio.ensure_future(self._serve(server))

    async def _serve(self, server: LinkServer) -> None:
        async def messages() -> AsyncIterator[ToDecode]:
            while (message := await self.up.get()) is not None:
                yield message

        async def write(message: ToPrefill) -> None:
            self.down.put_nowait(message)

        try:
            await server.serve(messages(), write)
            self.down.put_nowait(None)
        except Exception as error:
            self.down.put_nowait(error)

    async def write(self, message: ToDecode) -> None:
        await self.let_through.wait()
        self.up.put_nowait(message)

    async def messages(self) -> AsyncIterator[ToPrefill]:
        while (message := await self.down.get()) is not None:
            if isinstance(message, BaseException):
                raise message
            yield message

    def cut(self) -> None:
        self.task.cancel()
        self.down.put_nowait(Unavailable("connection lost"))


class Ends:
    def __init__(self) -> None:
        self.at_decode: Mailbox[Event] = Mailbox(bulk_limit_bytes=3000)
        self.at_prefill: Mailbox[Event] = Mailbox()
        self.server = LinkServer(self.at_decode, WELCOME, "fp")
        self.pipes: list[Pipe] = []
        self.peers: list[str] = []
        self.client = LinkClient(self.at_prefill, HELLO, self.dial, self.add_peer)

    @asynccontextmanager
    async def dial(self, address: str) -> AsyncIterator[Pipe]:
        assert address == "host:1"
        pipe = Pipe(self.server)
        self.pipes.append(pipe)
        try:
            yield pipe
        finally:
            pipe.task.cancel()

    async def add_peer(self, welcome: LinkWelcome) -> None:
        self.peers.append(f"add {welcome.incarnation}")

    def ensure(self, peer: Incarnation = D) -> None:
        self.client.ensure(OpenLink(peer, WorkerId("d"), "host:1"))


async def events_of(box: Mailbox[Event], enough: Callable[[list[Event]], bool]) -> list[Event]:
    """Everything posted until `enough`, at most 5 s."""
    got: list[Event] = []
    async with asyncio.timeout(5):
        while not enough(got):
            got += box.take(0)
            await asyncio.sleep(0)
    return got


async def test_messages_cross_in_order_after_the_greeting() -> None:
    ends = Ends()
    ends.ensure()
    ends.ensure()  # a second call changes nothing
    for epoch in range(5):
        ends.client.send(D, Renew(epoch))
    got = await events_of(ends.at_decode, lambda e: len(e) == 6)
    assert got == [LinkOpened(P), *(FromPrefill(P, Renew(i)) for i in range(5))]
    ends.server.send(P, Opened(1, 5.0))
    ends.server.send(P, LandedNotice(1))
    got = await events_of(ends.at_prefill, lambda e: len(e) == 3)
    assert got == [LinkOpened(D), FromDecode(D, Opened(1, 5.0)), FromDecode(D, LandedNotice(1))]
    assert ends.peers == ["add dd"]
    assert len(ends.pipes) == 1
    await ends.client.close()


async def test_a_cut_link_is_reported_on_both_sides_and_dialled_again_when_asked() -> None:
    ends = Ends()
    ends.ensure()
    await events_of(ends.at_prefill, lambda e: LinkOpened(D) in e)
    ends.pipes[0].cut()
    closed = await events_of(ends.at_prefill, lambda e: len(e) == 1)
    assert closed == [LinkClosed(D, by_kernel=False, reason="connection lost")]
    await events_of(ends.at_decode, lambda e: LinkClosed(P, by_kernel=True) in e)
    assert ends.peers == ["add dd"]
    ends.ensure()
    await events_of(ends.at_prefill, lambda e: LinkOpened(D) in e)
    await ends.client.close()


async def test_a_writer_that_dials_anew_ends_its_older_link_whose_loss_was_never_seen_here() -> None:
    """A line that fails for long ends the connection for who sends over it; the other end would be there for ever, and
    every new link of that writer refused.
    """
    ends = Ends()
    ends.ensure()
    await events_of(ends.at_prefill, lambda e: LinkOpened(D) in e)
    lost = ends.pipes[0]
    lost.down.put_nowait(Unavailable("timed out"))  # at this end alone: what the other one says or hears is lost
    serving, lost.task = lost.task, asyncio.ensure_future(asyncio.sleep(0))
    await events_of(ends.at_prefill, lambda e: len(e) == 1)
    ends.ensure()
    assert await events_of(ends.at_prefill, lambda e: len(e) == 1) == [LinkOpened(D)]
    # The writer lives: that its link ended proves nothing about what it may still write.
    assert ends.at_decode.take(0) == [LinkOpened(P), LinkClosed(P, by_kernel=False), LinkOpened(P)]
    lost.up.put_nowait(Renew(1))
    await asyncio.wait_for(serving, 5)
    ends.client.send(D, Renew(2))
    assert await events_of(ends.at_decode, lambda e: len(e) == 1) == [FromPrefill(P, Renew(2))]
    ends.server.send(P, LandedNotice(3))
    assert await events_of(ends.at_prefill, lambda e: len(e) == 1) == [FromDecode(D, LandedNotice(3))]
    await ends.client.close()
    assert await events_of(ends.at_decode, lambda e: len(e) == 1) == [LinkClosed(P, by_kernel=True)]


async def test_a_link_to_another_incarnation_is_refused_with_both_named() -> None:
    ends = Ends()
    ends.ensure(Incarnation("older"))
    [closed] = await events_of(ends.at_prefill, lambda e: len(e) == 1)
    assert isinstance(closed, LinkClosed)
    assert closed.reason == "incarnation differs: dd here, older wanted"
    assert ends.peers == []
    await ends.client.close()


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"protocol_version": 2}, "protocol_version"),
        ({"model_fingerprint": "other"}, "model_fingerprint"),
        ({"transport": "nixl"}, "transport"),
        ({"decode_incarnation": Incarnation("x")}, "incarnation"),
        ({"layout": replace(LAYOUT, block_size=32)}, "block_size"),
        ({"layout": replace(LAYOUT, dtype="bfloat16")}, "dtype"),
        ({"layout": replace(LAYOUT, kv_heads=2)}, "kv_heads"),
        ({"layout": replace(LAYOUT, layers=3)}, "layers"),
        ({"layout": replace(LAYOUT, head_dim=16)}, "head_dim"),
        ({"layout": replace(LAYOUT, shards=2)}, "shards"),
    ],
)
def test_pairs_that_differ_are_refused_by_name(change: dict[str, object], field: str) -> None:
    with pytest.raises(FailedPrecondition) as refused:
        check_hello(replace(HELLO, **change), WELCOME, "fp")
    assert refused.value.field == field
    assert "differs" in refused.value.message
    assert "here" in refused.value.message
    assert "there" in refused.value.message or "wanted" in refused.value.message


def test_workers_that_differ_in_nothing_but_their_names_pair() -> None:
    check_hello(replace(HELLO, worker_id=WorkerId("q"), incarnation=Incarnation("qq")), WELCOME, "fp")


async def test_a_link_must_begin_with_hello_and_say_it_once() -> None:
    ends = Ends()
    pipe = Pipe(ends.server)
    await pipe.write(Renew(1))
    error = await asyncio.wait_for(pipe.down.get(), 5)
    assert isinstance(error, InvalidArgument)
    assert error.field == "link.hello"
    pipe = Pipe(ends.server)
    await pipe.write(HELLO)
    await pipe.write(HELLO)
    assert await asyncio.wait_for(pipe.down.get(), 5) == WELCOME
    error = await asyncio.wait_for(pipe.down.get(), 5)
    assert isinstance(error, InvalidArgument)
    # We closed it: the peer may be alive, and writing.
    assert ends.at_decode.take(0) == [LinkOpened(P), LinkClosed(P, by_kernel=False)]


async def test_a_link_that_ends_here_says_nothing_about_the_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_server, "MAX_UNREAD", 3)
    for end in ("overflow", "stop"):
        ends = Ends()
        pipe = Pipe(ends.server)
        await pipe.write(HELLO)
        assert await asyncio.wait_for(pipe.down.get(), 5) == WELCOME
        if end == "overflow":
            for epoch in range(4):  # nobody writes in between: the event loop does not run
                ends.server.send(P, LandedNotice(epoch))
        else:
            ends.server.end_all()
        await asyncio.wait_for(pipe.task, 5)
        assert ends.at_decode.take(0) == [LinkOpened(P), LinkClosed(P, by_kernel=False)]
        again = Pipe(ends.server)
        await again.write(HELLO)
        assert await asyncio.wait_for(again.down.get(), 5) == WELCOME
        again.task.cancel()


async def test_bulk_data_waits_until_the_engine_has_taken_what_it_was_given() -> None:
    ends = Ends()
    ends.ensure()
    data = [BlockData(1, 0, i, 0, bytes(1800)) for i in range(6)]
    for message in data:
        await ends.client.send_bulk(D, message)
    got = await events_of(ends.at_decode, lambda e: len(e) >= 3)
    assert len(got) == 3, "3,600 bytes are over the bound of 3,000"
    got += await events_of(ends.at_decode, lambda e: len(got) + len(e) == 7)
    assert got[1:] == [FromPrefill(P, m) for m in data]
    await ends.client.close()


async def test_bulk_senders_wait_for_room_and_fail_when_the_link_is_gone() -> None:
    ends = Ends()
    ends.ensure()
    await events_of(ends.at_prefill, lambda e: LinkOpened(D) in e)
    ends.pipes[0].let_through.clear()
    for i in range(MAX_QUEUED):
        ends.client.send(D, Renew(i))
    waiting = asyncio.ensure_future(ends.client.send_bulk(D, BlockData(1, 0, 0, 0, b"x")))
    await asyncio.sleep(0)
    assert not waiting.done()
    ends.pipes[0].cut()
    with pytest.raises(Unavailable, match="gone"):
        await asyncio.wait_for(waiting, 5)
    with pytest.raises(Unavailable, match="gone"):
        await ends.client.send_bulk(D, BlockData(1, 0, 0, 0, b"x"))
    ends.client.send(D, Renew(1))  # control messages to nobody are dropped
    await ends.client.close()


async def test_a_writer_without_checksums_is_refused_by_a_decode_worker_that_checks_them() -> None:
    ends = Ends()
    ends.server = LinkServer(ends.at_decode, WELCOME, "fp", verify_kv=True)
    ends.ensure()
    closed = await events_of(ends.at_prefill, lambda e: len(e) == 1)
    message = "verify_kv differs: true here, false there: p sends no checksums"
    assert closed == [LinkClosed(D, by_kernel=False, reason=message)]
    ends.client = LinkClient(ends.at_prefill, replace(HELLO, verify_kv=True), ends.dial, ends.add_peer)
    ends.ensure()
    await events_of(ends.at_prefill, lambda e: LinkOpened(D) in e)
    await ends.client.close()


async def test_a_link_whose_transport_cannot_reach_the_peer_says_why_and_can_be_dialled_again() -> None:
    ends = Ends()

    async def broken(welcome: LinkWelcome) -> None:
        raise RuntimeError("no such device")

    ends.client = LinkClient(ends.at_prefill, HELLO, ends.dial, broken)
    ends.ensure()
    closed = await events_of(ends.at_prefill, lambda e: len(e) == 1)
    assert closed == [LinkClosed(D, by_kernel=False, reason="RuntimeError: no such device")]
    ends.ensure()
    assert len(await events_of(ends.at_prefill, lambda e: len(e) == 1)) == 1
