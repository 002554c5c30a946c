"""The transport port in one process: bytes equal, order decided by polls, each fault as asked for."""

from __future__ import annotations

import pytest
from handoff_values import DECODE, PREFILL, MemoryPool, ticket_of

from kvrelay.errors import FailedPrecondition
from kvrelay.link import PoolDescriptor
from kvrelay.requests import Incarnation
from kvtransfer.transports.base import NotificationArrived, Part, PeerTransport, WriteDone, WriteFailed
from kvtransfer.transports.loopback import Faults, LoopbackNetwork, LoopbackTransport

PART = Part(DECODE, 1, 0, (0, 1, 2), (4, 5, 6), (3, 1, 2), b"manifest")
DONE = (WriteDone(DECODE, 1, 0, 0.0),)
NOTE = NotificationArrived(PREFILL, b"manifest")


def pair(faults: Faults | None = None, refuses_late: bool = True):  # type: ignore[no-untyped-def]
    network = LoopbackNetwork()
    source, dest = MemoryPool(8, 64), MemoryPool(8, 64)
    source.fill()
    writer: PeerTransport = LoopbackTransport(PREFILL, source, network, faults=faults)
    reader = LoopbackTransport(DECODE, dest, network, refuses_late=refuses_late)
    writer.add_peer(DECODE, reader.metadata(), reader.pool())
    return writer, reader, source, dest


def same(source: MemoryPool, dest: MemoryPool, pairs: list[tuple[int, int]]) -> list[bool]:
    return [bytes(source.read(a)) == bytes(dest.read(b)) for a, b in pairs]


def test_a_part_arrives_with_its_manifest_when_the_writer_polls() -> None:
    writer, reader, source, dest = pair()
    reader.expect(ticket_of(epoch=1))
    writer.post(PART)
    assert reader.poll() == ()
    assert writer.poll() == DONE
    assert reader.poll() == (NOTE,)
    assert same(source, dest, [(4, 3), (5, 1), (6, 2)]) == [True] * 3
    assert bytes(dest.read(0)) == bytes(64)


def test_a_delayed_and_doubled_part_arrives_later_and_twice() -> None:
    writer, reader, _, _ = pair(Faults(delay=lambda _part: 2, duplicate=lambda _part: True))
    reader.expect(ticket_of(epoch=1))
    writer.post(PART)
    assert [writer.poll() for _ in range(3)] == [(), (), DONE]
    assert reader.poll() == (NOTE, NOTE)


def test_what_is_late_is_refused_and_counted_but_written_by_a_one_sided_transport() -> None:
    writer, reader, source, dest = pair()
    reader.expect(ticket_of(epoch=1))
    reader.unexpect(1)
    writer.post(PART)
    assert writer.poll() == DONE
    assert reader.refused == 3
    assert bytes(dest.read(3)) == bytes(64)
    writer, reader, source, dest = pair(refuses_late=False)
    writer.post(PART)
    writer.poll()
    assert same(source, dest, [(4, 3)]) == [True]


def test_a_write_that_fails_in_part_may_land_later_all_the_same() -> None:
    writer, reader, source, dest = pair(Faults(fail_after=lambda _part: 1, late=lambda _part: 1))
    reader.expect(ticket_of(epoch=1))
    writer.post(PART)
    assert writer.poll() == (WriteFailed(DECODE, 1, 0, "injected"),)
    assert same(source, dest, [(4, 3), (5, 1), (6, 2)]) == [True, False, False]
    assert [writer.poll(), writer.poll(), reader.poll()] == [(), (), ()]
    assert same(source, dest, [(4, 3), (5, 1), (6, 2)]) == [True, True, True]


def test_a_peer_that_is_gone_or_dropped_ends_its_writes_as_failed() -> None:
    writer, reader, _, _ = pair()
    writer.post(PART)
    reader.close()
    assert writer.poll() == (WriteFailed(DECODE, 1, 0, "the peer is gone"),)
    writer.post(PART)
    writer.drop_peer(DECODE)
    assert writer.poll() == (WriteFailed(DECODE, 1, 0, "the peer was dropped"),)


@pytest.mark.parametrize(("peer", "block_bytes"), [(DECODE, 32), (Incarnation("nobody"), 64)])
def test_a_peer_of_another_shape_or_unknown_is_refused(peer: Incarnation, block_bytes: int) -> None:
    writer, _, _, _ = pair()
    with pytest.raises(FailedPrecondition):
        writer.add_peer(peer, b"", PoolDescriptor(0, block_bytes, 8))
