"""The transport port inside one process, without threads or clocks: what happens is decided by posts and polls alone.

For tests and simulation. Faults are asked for per part, so a run can be replayed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvrelay.blocks import Ticket
from kvrelay.errors import FailedPrecondition
from kvrelay.link import PoolDescriptor
from kvrelay.requests import Incarnation
from kvtransfer.store import BlockStore
from kvtransfer.transports.base import NotificationArrived, Part, TransportEvent, WriteDone, WriteFailed


@dataclass(frozen=True, slots=True)
class Faults:
    """What goes wrong with a part. All counts are polls of the writer.

    delay: polls before it is delivered. fail_after: blocks written before the write ends as failed, None if it does
    not. late: if it failed, polls after which its other blocks land all the same, None for never. duplicate: the
    manifest arrives twice.
    """

    delay: Callable[[Part], int] = lambda _part: 0
    fail_after: Callable[[Part], int | None] = lambda _part: None
    late: Callable[[Part], int | None] = lambda _part: None
    duplicate: Callable[[Part], bool] = lambda _part: False


@dataclass(slots=True)
class _Flight:
    part: Part
    polls_left: int
    from_block: int = 0
    ended: bool = False


@dataclass(slots=True)
class LoopbackNetwork:
    """Who can be written to: transports by incarnation."""

    members: dict[Incarnation, LoopbackTransport] = field(default_factory=dict)


class LoopbackTransport:
    """refuses_late: blocks of a ticket that is not expected are dropped and counted in `refused`; if False they are
    written, as a one-sided write would be."""

    name = "loopback"

    def __init__(
        self,
        incarnation: Incarnation,
        store: BlockStore,
        network: LoopbackNetwork,
        *,
        refuses_late: bool = True,
        faults: Faults | None = None,
    ) -> None:
        self.refuses_late = refuses_late
        self.refused = 0
        self._incarnation, self._store, self._network = incarnation, store, network
        self._faults = faults or Faults()
        self._expected: set[int] = set()
        self._flights: list[_Flight] = []
        self._events: deque[TransportEvent] = deque()
        network.members[incarnation] = self

    def metadata(self) -> bytes:
        return b""

    def pool(self) -> PoolDescriptor:
        return PoolDescriptor(self._store.base, self._store.block_bytes, self._store.num_blocks)

    def add_peer(self, incarnation: Incarnation, metadata: bytes, pool: PoolDescriptor) -> None:
        if pool.block_bytes != self._store.block_bytes or incarnation not in self._network.members:
            raise FailedPrecondition(f"cannot write to {incarnation}: unknown, or its blocks have another size")

    def drop_peer(self, incarnation: Incarnation) -> None:
        for flight in [f for f in self._flights if f.part.peer == incarnation]:
            self._flights.remove(flight)
            if not flight.ended:
                self._fail(flight.part, "the peer was dropped")

    def expect(self, ticket: Ticket) -> None:
        self._expected.add(ticket.epoch)

    def unexpect(self, epoch: int) -> None:
        self._expected.discard(epoch)

    def post(self, part: Part) -> None:
        self._flights.append(_Flight(part, self._faults.delay(part)))

    def poll(self) -> tuple[TransportEvent, ...]:
        """Moves what we posted on by one poll, then gives the events since the last one."""
        for flight in list(self._flights):
            if flight.polls_left > 0:
                flight.polls_left -= 1
            else:
                self._flights.remove(flight)
                self._arrive(flight)
        return tuple(self._events.popleft() for _ in range(len(self._events)))

    def close(self) -> None:
        self._flights.clear()
        self._network.members.pop(self._incarnation, None)

    def _arrive(self, flight: _Flight) -> None:
        part = flight.part
        peer = self._network.members.get(part.peer)
        if peer is None:
            if not flight.ended:
                self._fail(part, "the peer is gone")
            return
        fail_after = None if flight.ended else self._faults.fail_after(part)
        peer._take(part, self._store, flight.from_block, len(part.dest_ids) if fail_after is None else fail_after)
        if flight.ended:
            return
        if fail_after is not None:
            self._fail(part, "injected")
            late = self._faults.late(part)
            if late is not None:
                self._flights.append(_Flight(part, late, fail_after, ended=True))
            return
        for _ in range(2 if self._faults.duplicate(part) else 1):
            peer._events.append(NotificationArrived(self._incarnation, part.manifest))
        self._events.append(WriteDone(part.peer, part.epoch, part.part, 0.0))

    def _take(self, part: Part, source: BlockStore, start: int, stop: int) -> None:
        """Blocks start..stop-1 of a part arrive in our pool, unless we refuse them."""
        if self.refuses_late and part.epoch not in self._expected:
            self.refused += stop - start
            return
        for source_id, dest_id in zip(part.source_ids[start:stop], part.dest_ids[start:stop], strict=True):
            self._store.write(dest_id, 0, bytes(source.read(source_id)))

    def _fail(self, part: Part, error: str) -> None:
        self._events.append(WriteFailed(part.peer, part.epoch, part.part, error))
