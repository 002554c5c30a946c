"""The state of one hand-off on the prefill side, and what can happen to it. Values only; decides nothing."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass

from kvrelay.blocks import Ticket
from kvrelay.link import LEASE_S
from kvrelay.requests import Incarnation, SequenceKey

FAILED_WRITE_VERDICT_S = 2.5
"""A failed write and a dead peer look alike for a moment. If the link outlives the failure by this much, the peer lives
and the write may still land in its blocks; it reuses none of them before we say fenced, so waiting is safe."""
LINK_LOST_HOLD_S = 1.0
"""After the link was lost a failed write's sources stay pinned this long: a new link would prove the peer alive."""
DEATH_UNPROVED_S = 2.0
"""After the link was lost and a write failed, the process ends if by then nothing proved that the peer is dead."""
LINK_LOST_EXIT_S = 0.8
"""A write still running this long after the link was lost ends the process: a live peer takes the closed link for our
death and reuses the blocks after receiver_ticket.PEER_GONE_S (3 s). The time
between is for a turn of our engine that lasts long, since we notice only between turns, and for what is on the wire."""
STUCK_WRITE_S = 30.0
"""With no write to a peer ended for so long, those under way are given up: another placement is tried. So is what is
written and not landed for so long. A write that has not ended this long after its ticket began to close never will:
only a new process helps."""


class WriterState(enum.Enum):
    OPENING = "opening"
    OPEN = "open"
    CLOSING = "closing"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class WriterRules:
    """What is equal for all tickets of a prefill worker. checksum_of: CRC-32 of a block of our pool, for manifests."""

    incarnation: Incarnation
    block_bytes: int
    refuses_late: bool = False
    checksum_of: Callable[[int], int] | None = None


@dataclass(frozen=True, slots=True)
class QueuedPart:
    """Blocks given to us with one reference each, under the number they are posted with."""

    part: int
    positions: tuple[int, ...]
    source_ids: tuple[int, ...]
    last: bool


@dataclass(frozen=True, slots=True)
class WritingTicket:
    """A ticket and how far its writing got.

    queued: parts that wait for the lease. posted: parts whose write has not ended. failed: parts whose write ended
    other than done while it is not known whether the peer lives; their sources stay pinned. asked_at: when the open
    or renew that is not yet answered was about to be sent. told: Failed was said.
    moved_at: when it was opened, one of its writes ended, or one was posted with none under way: the latest of these.
    relinked: the link was lost and is there again: the peer lives. peer_dead: a dial proved that it does not.
    clean: every write ended done, so fenced may be said. doomed: the process must exit.
    """

    ticket: Ticket
    key: SequenceKey
    rules: WriterRules
    expected: range
    lease_until: float
    asked_at: float | None = None
    renew_at: float = 0.0
    state: WriterState = WriterState.OPENING
    open_sent: bool = False
    given: frozenset[int] = frozenset()
    next_part: int = 0
    queued: tuple[QueuedPart, ...] = ()
    posted: tuple[QueuedPart, ...] = ()
    failed: tuple[QueuedPart, ...] = ()
    failed_at: float = 0.0
    link_lost_at: float | None = None
    relinked: bool = False
    peer_dead: bool = False
    landed_at: float | None = None
    told: bool = False
    clean: bool = True
    doomed: bool = False
    moved_at: float = 0.0
    closing_at: float | None = None
    parts_done: int = 0
    blocks_done: int = 0
    write_s: float = 0.0

    @property
    def peer(self) -> Incarnation:
        return self.ticket.incarnation

    @property
    def is_given(self) -> bool:
        """Whether every block that is to be written has been given to us."""
        return len(self.given) == len(self.expected)

    @property
    def is_written(self) -> bool:
        """Whether all of them are written, as far as this side can tell."""
        return self.is_given and not (self.queued or self.posted or self.failed)

    def deadline(self) -> float | None:
        """When a tick would change something, None if none would; how long no write ended is for any tick to see."""
        if self.state is WriterState.ENDED or self.doomed:
            return None
        times: list[float] = []
        if self.link_lost_at is None:
            if self.state is not WriterState.CLOSING:
                times.append(self.lease_until)
            if self.state is not WriterState.OPENING and self.asked_at is None:
                times.append(self.renew_at)
            if self.failed:
                times.append(self.failed_at + FAILED_WRITE_VERDICT_S)
            if self.posted and self.closing_at is not None and not self.rules.refuses_late:
                times.append(self.closing_at + STUCK_WRITE_S)
        elif self.posted:
            if not self.rules.refuses_late:
                times.append(self.link_lost_at + self.exit_s)
        else:
            times.append(self.link_lost_at + self.hold_s)
        return min(times, default=None)

    @property
    def in_doubt(self) -> bool:
        """The peer may live and take us for dead: what was written to it may soon have to end this process."""
        lost = self.link_lost_at is not None and not self.rules.refuses_late
        return lost and bool(self.posted or (self.failed and not self.peer_dead))

    @property
    def exit_s(self) -> float:
        """How long after the loss of the link, or over grpc after the last end of one, a write may still run."""
        return STUCK_WRITE_S if self.rules.refuses_late else LINK_LOST_EXIT_S

    @property
    def hold_s(self) -> float:
        """How long after the loss of the link sources of failed writes stay pinned, or until the process ends."""
        return DEATH_UNPROVED_S if self.failed and not self.peer_dead else LINK_LOST_HOLD_S


def started(ticket: Ticket, key: SequenceKey, num_tokens: int, rules: WriterRules, now: float) -> WritingTicket:
    """The ticket as it is before its open is sent; it has a lease's time to be."""
    return WritingTicket(ticket, key, rules, ticket.expected_positions(num_tokens), lease_until=now + LEASE_S)


@dataclass(frozen=True, slots=True)
class PartReady:
    positions: tuple[int, ...]
    source_ids: tuple[int, ...]
    last: bool


@dataclass(frozen=True, slots=True)
class WasOpened:
    lease_s: float


@dataclass(frozen=True, slots=True)
class WasRefused:
    reason: str


@dataclass(frozen=True, slots=True)
class WasRenewed:
    lease_s: float


@dataclass(frozen=True, slots=True)
class HasLanded:
    pass


@dataclass(frozen=True, slots=True)
class WasAborted:
    """Decode wants no more of it."""

    reason: str


@dataclass(frozen=True, slots=True)
class AbortWanted:
    """Our side wants no more of it."""


@dataclass(frozen=True, slots=True)
class WroteDone:
    """seconds: from post to done, as the transport measured it."""

    part: int
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class WroteFailed:
    part: int
    error: str
    posted: bool


@dataclass(frozen=True, slots=True)
class LinkLost:
    """Or it could not be made. reason: for people. peer_dead: nobody, or another incarnation, answers there."""

    reason: str = ""
    peer_dead: bool = False


@dataclass(frozen=True, slots=True)
class LinkOpened:
    """The peer's incarnation answered on a link: it lives."""


@dataclass(frozen=True, slots=True)
class Tick:
    """wrote_at: when a write to this peer ended last, of whichever ticket."""

    wrote_at: float = -math.inf


Event = (
    PartReady
    | WasOpened
    | WasRefused
    | WasRenewed
    | HasLanded
    | WasAborted
    | AbortWanted
    | WroteDone
    | WroteFailed
    | LinkLost
    | LinkOpened
    | Tick
)
