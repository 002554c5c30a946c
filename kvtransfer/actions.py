"""What the two hand-off tables ask their worker to do. Values only: knows neither links, pools nor clocks.

A table returns them in the order in which they must be carried out.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.blocks import Ticket
from kvrelay.link import ToDecode, ToPrefill
from kvrelay.requests import Incarnation, SequenceKey
from kvtransfer.transports.base import Part


@dataclass(frozen=True, slots=True)
class Count:
    """Add `by` to the counter `name`."""

    name: str
    by: int = 1


# decode side


@dataclass(frozen=True, slots=True)
class Reply:
    """Send over the link from `writer`. Dropped if that link is gone."""

    writer: Incarnation
    message: ToPrefill


@dataclass(frozen=True, slots=True)
class Expect:
    """Writes of this ticket may arrive from now on: give it to the transport."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Unexpect:
    """Nothing of this ticket matters to the transport any more."""

    epoch: int


@dataclass(frozen=True, slots=True)
class HoldBlocks:
    """RESERVED -> HELD with one reference, owned by the ticket's sequence."""

    epoch: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class QuarantineBlocks:
    """RESERVED -> QUARANTINED: a write may still land."""

    epoch: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FreeBlocks:
    """RESERVED or QUARANTINED -> FREE: nobody can write to them any more."""

    epoch: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DropPrefix:
    """Drop the ticket's references on the cached prefix blocks it held (never written by the writer)."""

    epoch: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WriteBytes:
    """Copy `data` into the block from byte `offset` on (transports whose bytes come over the link)."""

    block_id: int
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class LandedTicket:
    """Every expected block holds its KV. From here on the sequence owns the blocks; the table forgot the ticket."""

    key: SequenceKey
    epoch: int


@dataclass(frozen=True, slots=True)
class LostTicket:
    """Receiving failed, through no wish of the coordinator: it must be told. The blocks are handled separately."""

    key: SequenceKey
    epoch: int
    reason: str


ReceiverAction = (
    Count
    | Reply
    | Expect
    | Unexpect
    | HoldBlocks
    | QuarantineBlocks
    | FreeBlocks
    | DropPrefix
    | WriteBytes
    | LandedTicket
    | LostTicket
)


# prefill side


@dataclass(frozen=True, slots=True)
class Send:
    """Send over the link to the decode incarnation `peer`. Dropped if that link is gone."""

    peer: Incarnation
    message: ToDecode


@dataclass(frozen=True, slots=True)
class Post:
    """Give the part to the transport, now and once. If that raises, report write_failed(posted=False)."""

    part: Part


@dataclass(frozen=True, slots=True)
class Release:
    """Drop one reference of each source block: its write ended, or was never posted."""

    source_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PushStats:
    """What a hand-off cost. write_s: the sum of its writes' durations; landed_at: on the clock given to the table."""

    parts: int
    blocks: int
    bytes: int
    write_s: float
    landed_at: float


@dataclass(frozen=True, slots=True)
class Finished:
    """Decode holds every block and every write of ours has ended. The table forgot the ticket."""

    key: SequenceKey
    peer: Incarnation
    epoch: int
    stats: PushStats


@dataclass(frozen=True, slots=True)
class Failed:
    """The attempt cannot be handed over. Said once, at once; writes still in flight are released as they end."""

    key: SequenceKey
    peer: Incarnation
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class ExitProcess:
    """A write of ours may still land in blocks that a live decode worker would reuse: only our death rules it out.

    Carry it out at once, with a non-zero status and without closing links by hand first.
    """

    reason: str


WriterAction = Count | Send | Post | Release | Finished | Failed | ExitProcess
