"""Blocks as frames: small enough, byte-equal through the receiver table, and never blocking the poster."""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable

import pytest
from handoff_values import DECODE, PREFILL, MemoryPool, key_of, prompt_tokens, ticket_of

from kvrelay.errors import Internal, ResourceExhausted
from kvrelay.link import BlockData, OpenTicket, PartManifest
from kvrelay.requests import Incarnation
from kvtransfer.actions import LandedTicket, WriteBytes
from kvtransfer.manifest import Manifest, encode
from kvtransfer.receiver import ReceiverTable
from kvtransfer.transports import grpc
from kvtransfer.transports.base import Part, TransportEvent, WriteDone, WriteFailed
from kvtransfer.transports.grpc import MAX_DATA_BYTES, GrpcTransport, frames

BLOCK = 368_640
TICKET = ticket_of(epoch=1, block_ids=(5, 3, 4))


def part_of(peer: Incarnation = DECODE, number: int = 0) -> Part:
    manifest = encode(Manifest(1, DECODE, PREFILL, number, (0, 1, 2), (5, 3, 4), True))
    return Part(peer, 1, number, (0, 1, 2), (0, 1, 2), (5, 3, 4), manifest)


class Wire:
    """A send callback and the events of a transport, both across threads."""

    def __init__(self, send: Callable[[Incarnation, BlockData | PartManifest], None] | None = None) -> None:
        self.pool = MemoryPool(3, BLOCK)
        self.pool.fill()
        self.sent: queue.Queue[BlockData | PartManifest] = queue.Queue()
        self.events: queue.Queue[TransportEvent] = queue.Queue()
        self.failed: queue.Queue[BaseException] = queue.Queue()
        self.transport = GrpcTransport(
            self.pool,
            send or (lambda _peer, message: self.sent.put(message)),
            on_event=self.events.put,
            on_failed=self.failed.put,
        )

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self.transport.close()


def test_frames_are_small_and_the_manifest_is_last() -> None:
    pool = MemoryPool(3, BLOCK)
    messages = list(frames(pool, part_of()))
    assert [type(m) for m in messages] == [BlockData] * 6 + [PartManifest]
    assert [(m.position, m.offset, len(m.data)) for m in messages[:2] if isinstance(m, BlockData)] == [
        (0, 0, MAX_DATA_BYTES),
        (0, MAX_DATA_BYTES, BLOCK - MAX_DATA_BYTES),
    ]


def test_blocks_arrive_byte_equal_through_the_receiver_table() -> None:
    dest = MemoryPool(6, BLOCK)
    table = ReceiverTable(DECODE, BLOCK, refuses_late=True, bytes_over_link=True)
    table.reserve(TICKET, prompt_tokens(TICKET), key_of(), 0.0)
    table.open(PREFILL, OpenTicket(1, DECODE, key_of().request_id, 1), 0.0)
    with Wire() as wire:
        wire.transport.post(part_of())
        done = wire.events.get(timeout=10)
        assert isinstance(done, WriteDone)
        actions = [a for _ in range(7) for a in table.received(PREFILL, wire.sent.get(timeout=10), 0.0)]
    for action in actions:
        if isinstance(action, WriteBytes):
            dest.write(action.block_id, action.offset, action.data)
    assert LandedTicket(key_of(), 1) in actions
    assert [bytes(dest.read(d)) == bytes(wire.pool.read(s)) for s, d in ((0, 5), (1, 3), (2, 4))] == [True] * 3


def test_a_stuck_peer_blocks_neither_the_poster_nor_other_peers() -> None:
    release, other = threading.Event(), Incarnation("decode-2")
    with Wire(lambda peer, _message: None if peer == other else (release.wait(20), None)[1]) as wire:
        wire.transport.post(part_of())
        wire.transport.post(part_of(other))
        event = wire.events.get(timeout=10)
        assert isinstance(event, WriteDone)
        assert event.peer == other
        release.set()
        assert wire.events.get(timeout=10).peer == DECODE  # type: ignore[union-attr]


def test_a_link_that_breaks_fails_the_part_and_the_next_part_gets_its_own_event() -> None:
    def send(_peer: Incarnation, message: BlockData | PartManifest) -> None:
        raise ConnectionError("gone")

    with Wire(send) as wire:
        for number in (0, 1):
            wire.transport.post(part_of(number=number))
            expected = WriteFailed(DECODE, 1, number, "ConnectionError: gone")
            assert wire.events.get(timeout=10) == expected


def test_what_waits_behind_a_part_that_a_full_link_did_not_take_in_time_fails_with_it() -> None:
    """Each would else hold its blocks for as long as the one before it: twenty of them ten minutes."""
    entered, release, tried = threading.Event(), threading.Event(), list[int]()

    def send(_peer: Incarnation, message: BlockData | PartManifest) -> None:
        assert isinstance(message, BlockData)
        tried.append(message.part)
        entered.set()
        assert release.wait(20)
        raise TimeoutError

    with Wire(send) as wire:
        wire.transport.post(part_of(number=0))
        assert entered.wait(10)
        wire.transport.post(part_of(number=1))
        wire.transport.post(part_of(number=2))
        release.set()
        first, *behind = [wire.events.get(timeout=10) for _ in range(3)]
        assert first == WriteFailed(DECODE, 1, 0, "TimeoutError: ")
        reason = "it waited behind one that the link did not take in time"
        assert behind == [WriteFailed(DECODE, 1, number, reason, posted=False) for number in (1, 2)]
        wire.transport.post(part_of(number=3))
        assert wire.events.get(timeout=10) == WriteFailed(DECODE, 1, 3, "TimeoutError: ")
    assert tried == [0, 3]


def test_dropping_a_peer_ends_its_waiting_parts_as_never_begun() -> None:
    entered, release = threading.Event(), threading.Event()

    def send(_peer: Incarnation, _message: BlockData | PartManifest) -> None:
        entered.set()
        release.wait(20)

    with Wire(send) as wire:
        wire.transport.post(part_of(number=0))
        wire.transport.post(part_of(number=1))
        assert entered.wait(10)
        wire.transport.drop_peer(DECODE)
        release.set()
        first, second = wire.events.get(timeout=10), wire.events.get(timeout=10)
        assert isinstance(first, WriteDone)
        assert second == WriteFailed(DECODE, 1, 1, "the peer was dropped", posted=False)


def test_too_many_waiting_parts_are_refused_and_a_closed_transport_takes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc, "MAX_QUEUED_PARTS", 2)
    release = threading.Event()
    with Wire(lambda _peer, _message: (release.wait(20), None)[1]) as wire:
        posts = [functools.partial(wire.transport.post, part_of(number=number)) for number in range(4)]
        with pytest.raises(ResourceExhausted):
            [post() for post in posts]
        release.set()
    with pytest.raises(Internal):
        wire.transport.post(part_of())


def test_a_sending_thread_that_dies_is_noticed() -> None:
    with Wire() as wire:
        wire.transport._on_event = lambda _event: (_ for _ in ()).throw(RuntimeError("hook"))
        wire.transport.post(part_of())
        assert str(wire.failed.get(timeout=10)) == "hook"
