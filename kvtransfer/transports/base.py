"""The transport port: a part goes in, its ending and the peer's manifests come out. Knows no tickets' states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kvrelay.blocks import Ticket
from kvrelay.link import PoolDescriptor
from kvrelay.requests import Incarnation


@dataclass(frozen=True, slots=True)
class Part:
    """The blocks of one push: block source_ids[i] of our pool goes to block dest_ids[i] of the peer's.

    positions[i] is its logical position.

    The poster keeps one reference on each source until WriteDone or WriteFailed of this part.
    """

    peer: Incarnation
    epoch: int
    part: int
    positions: tuple[int, ...]
    source_ids: tuple[int, ...]
    dest_ids: tuple[int, ...]
    manifest: bytes


@dataclass(frozen=True, slots=True)
class WriteDone:
    """Every byte of the part has left our pool and lies in the peer's. seconds: from post to the end."""

    peer: Incarnation
    epoch: int
    part: int
    seconds: float


@dataclass(frozen=True, slots=True)
class WriteFailed:
    """The write ended in any other way. posted False: it was never begun, nothing of it can land."""

    peer: Incarnation
    epoch: int
    part: int
    error: str
    posted: bool = True


@dataclass(frozen=True, slots=True)
class NotificationArrived:
    """A manifest that arrived together with its data. peer None: the transport cannot say who sent it."""

    peer: Incarnation | None
    payload: bytes


TransportEvent = WriteDone | WriteFailed | NotificationArrived


class Transport(Protocol):
    """Moves parts. Every accepted part ends in exactly one WriteDone or WriteFailed."""

    @property
    def name(self) -> str: ...

    @property
    def refuses_late(self) -> bool:
        """True if the receiving side can refuse a write after its ticket ended (then nothing is quarantined)."""
        ...

    def expect(self, ticket: Ticket) -> None:
        """Receiver: writes of this ticket may arrive until unexpect."""
        ...

    def unexpect(self, epoch: int) -> None: ...

    def post(self, part: Part) -> None:
        """Sender: begin the write. Raises only if the part was not accepted (then no event follows)."""
        ...

    def poll(self) -> tuple[TransportEvent, ...]:
        """Events since the last poll, in order."""
        ...

    def close(self) -> None:
        """Ends the transport; parts still in flight get no event."""
        ...


class PeerTransport(Transport, Protocol):
    """A transport as a worker wires it to its links: what its hello and welcome carry."""

    def metadata(self) -> bytes:
        """For the hello: what the peer's add_peer needs."""
        ...

    def pool(self) -> PoolDescriptor:
        """For the welcome: where our pool lies."""
        ...

    def add_peer(self, incarnation: Incarnation, metadata: bytes, pool: PoolDescriptor) -> None:
        """Writer: before the first post to this incarnation. Twice is once. May wait; raises FailedPrecondition."""
        ...

    def drop_peer(self, incarnation: Incarnation) -> None:
        """Writer: the incarnation is gone; frees what was kept for it. May wait. Unknown ones are ignored."""
        ...
