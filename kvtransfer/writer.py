"""Every ticket a prefill worker writes to, by (decode incarnation, epoch). Knows neither pools, links nor transports.

All methods return actions in the order in which they are to be carried out and change nothing but the table.
The worker calls link_opened when a peer has welcomed it, and link_lost when the link ended or could not be made.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

from kvrelay.blocks import Ticket
from kvrelay.link import (
    AbortedNotice,
    Fenced,
    LandedNotice,
    Opened,
    OpenRefused,
    Renewed,
    ToPrefill,
)
from kvrelay.requests import Incarnation, SequenceKey
from kvtransfer.actions import Count, Failed, Release, Send, WriterAction
from kvtransfer.transports.base import WriteDone, WriteFailed
from kvtransfer.writer_steps import step
from kvtransfer.writer_ticket import (
    AbortWanted,
    Event,
    HasLanded,
    LinkLost,
    LinkOpened,
    PartReady,
    Tick,
    WasAborted,
    WasOpened,
    WasRefused,
    WasRenewed,
    WriterRules,
    WriterState,
    WritingTicket,
    WroteDone,
    WroteFailed,
    started,
)

Actions = tuple[WriterAction, ...]
MAX_KEPT_FENCES = 1024
"""The oldest is forgotten first; its blocks come back by the peer's other ways."""

__all__ = ["Actions", "WriterState", "WriterTable"]


class WriterTable:
    """The hand-offs of a prefill worker from start until their last write ended; then the table forgets them.

    refuses_late: the receiver refuses a write after its ticket ended, so a failed write is no danger.
    checksum_of: CRC-32 of a block of our pool; if given, manifests carry checksums.
    """

    def __init__(
        self,
        incarnation: Incarnation,
        block_bytes: int,
        *,
        refuses_late: bool = False,
        checksum_of: Callable[[int], int] | None = None,
    ) -> None:
        self._rules = WriterRules(incarnation, block_bytes, refuses_late, checksum_of)
        self._tickets: dict[tuple[Incarnation, int], WritingTicket] = {}
        self._up: set[Incarnation] = set()
        self._fences: dict[tuple[Incarnation, int], None] = {}
        self._wrote_at: dict[Incarnation, float] = {}

    def start(self, ticket: Ticket, peer: Incarnation, key: SequenceKey, num_tokens: int, now: float) -> Actions:
        """Begin a hand-off to `peer`, the incarnation the link leads to. Owns no blocks yet.

        The link need not be up: opening waits for link_opened, and fails at link_lost or after a lease.
        """
        if (peer, ticket.epoch) in self._tickets:
            raise ValueError(f"ticket {ticket.epoch} of {peer} was started before")
        if ticket.incarnation != peer:
            return (Failed(key, peer, ticket.epoch, f"the ticket is of incarnation {ticket.incarnation}"),)
        self._tickets[peer, ticket.epoch] = started(ticket, key, num_tokens, self._rules, now)
        return self._apply(peer, ticket.epoch, LinkOpened(), now) if peer in self._up else ()

    def part_ready(
        self,
        peer: Incarnation,
        epoch: int,
        positions: tuple[int, ...],
        source_ids: tuple[int, ...],
        last: bool,
        now: float,
    ) -> Actions:
        """Blocks to push, each with one reference that the table now owns and gives back in a Release.

        positions: logical, not given before. Posted once the lease allows it.
        """
        if (peer, epoch) not in self._tickets:
            return (Release(source_ids),) if source_ids else ()
        return self._apply(peer, epoch, PartReady(positions, source_ids, last), now)

    def received(self, peer: Incarnation, message: ToPrefill, now: float) -> Actions:
        """Any message of the link to `peer` but LinkWelcome, which is the worker's business."""
        match message:
            case Opened():
                return self.opened(peer, message, now)
            case OpenRefused():
                return self.open_refused(peer, message, now)
            case Renewed():
                return self.renewed(peer, message, now)
            case LandedNotice():
                return self.landed(peer, message, now)
            case AbortedNotice():
                return self.aborted(peer, message, now)
        return (Count("unexpected_message"),)

    def opened(self, peer: Incarnation, msg: Opened, now: float) -> Actions:
        return self._apply(peer, msg.epoch, WasOpened(msg.lease_s), now)

    def open_refused(self, peer: Incarnation, msg: OpenRefused, now: float) -> Actions:
        return self._apply(peer, msg.epoch, WasRefused(msg.reason), now)

    def renewed(self, peer: Incarnation, msg: Renewed, now: float) -> Actions:
        return self._apply(peer, msg.epoch, WasRenewed(msg.lease_s), now)

    def landed(self, peer: Incarnation, msg: LandedNotice, now: float) -> Actions:
        return self._apply(peer, msg.epoch, HasLanded(), now)

    def aborted(self, peer: Incarnation, msg: AbortedNotice, now: float) -> Actions:
        return self._apply(peer, msg.epoch, WasAborted(msg.reason), now)

    def abort(self, peer: Incarnation, epoch: int, now: float) -> Actions:
        """Our side wants no more of it, for instance because the request was cancelled."""
        return self._apply(peer, epoch, AbortWanted(), now)

    def transport_event(self, event: WriteDone | WriteFailed, now: float) -> Actions:
        if isinstance(event, WriteDone):
            return self.write_done(event.peer, event.epoch, event.part, now, seconds=event.seconds)
        return self.write_failed(event.peer, event.epoch, event.part, event.error, now, posted=event.posted)

    def write_done(self, peer: Incarnation, epoch: int, part: int, now: float, *, seconds: float = 0.0) -> Actions:
        self._wrote_at[peer] = now
        return self._apply(peer, epoch, WroteDone(part, seconds), now)

    def write_failed(
        self, peer: Incarnation, epoch: int, part: int, error: str, now: float, *, posted: bool = True
    ) -> Actions:
        """posted False: the write was never begun, so nothing of it can land."""
        self._wrote_at[peer] = now
        return self._apply(peer, epoch, WroteFailed(part, error, posted), now)

    def link_opened(self, peer: Incarnation, now: float) -> Actions:
        """A link to this incarnation is up. Says all fences again: the last ones may be lost with the link before."""
        self._up.add(peer)
        epochs = [epoch for of, epoch in self._fences if of == peer]
        return tuple(Send(peer, Fenced(epoch)) for epoch in epochs) + self._apply_all(peer, LinkOpened(), now)

    def link_lost(self, peer: Incarnation, now: float, reason: str = "", peer_dead: bool = False) -> Actions:
        """The link ended or could not be made. While in_flight is not 0, dial again: an answer means the peer lives.

        reason: why, for people; who waits for the hand-off hears it. peer_dead: a dial found nobody, or somebody else.
        """
        self._up.discard(peer)
        return self._apply_all(peer, LinkLost(reason, peer_dead), now)

    def tick(self, now: float) -> Actions:
        """Looks at every ticket. Call it when next_deadline() has passed, after the messages that are waiting."""
        tickets = list(self._tickets)
        ticks = {peer: Tick(self._wrote_at.get(peer, -math.inf)) for peer, _ in tickets}
        self._wrote_at = {peer: tick.wrote_at for peer, tick in ticks.items()}
        return tuple(action for peer, epoch in tickets for action in self._apply(peer, epoch, ticks[peer], now))

    def next_deadline(self) -> float | None:
        """When tick() has something to do; None if only a message can change anything."""
        deadlines = (ticket.deadline() for ticket in self._tickets.values())
        return min((d for d in deadlines if d is not None), default=None)

    def counts(self) -> dict[WriterState, int]:
        """How many tickets are in each state now; ended ones are forgotten and always 0."""
        found = Counter(ticket.state for ticket in self._tickets.values())
        return {state: found[state] for state in WriterState}

    @property
    def in_flight(self) -> int:
        """Tickets the table has not forgotten: while it is not 0, blocks of ours may be pinned."""
        return len(self._tickets)

    @property
    def in_doubt(self) -> bool:
        """A tick may have to end the process within a second or two, and may not be late: begin nothing long before."""
        return any(ticket.in_doubt for ticket in self._tickets.values())

    def busy_with(self, peer: Incarnation) -> bool:
        """True while a ticket of this peer lives. A peer that may be alive is not dropped from the transport before."""
        return any(of == peer for of, _ in self._tickets)

    def state(self, peer: Incarnation, epoch: int) -> WriterState | None:
        """None once it ended."""
        ticket = self._tickets.get((peer, epoch))
        return None if ticket is None else ticket.state

    def _apply_all(self, peer: Incarnation, event: Event, now: float) -> Actions:
        epochs = [epoch for of, epoch in self._tickets if of == peer]
        return tuple(action for epoch in epochs for action in self._apply(peer, epoch, event, now))

    def _apply(self, peer: Incarnation, epoch: int, event: Event, now: float) -> Actions:
        """Messages may cross the end of their ticket: those of an unknown one mean nothing."""
        ticket = self._tickets.get((peer, epoch))
        if ticket is None:
            return ()
        after, actions = step(ticket, event, now)
        if after.state is WriterState.ENDED:
            del self._tickets[peer, epoch]
        else:
            self._tickets[peer, epoch] = after
        return self._keep_fences(peer, actions)

    def _keep_fences(self, peer: Incarnation, actions: Actions) -> Actions:
        """Fences are kept for the next link, since a link that ends takes with it what was said last."""
        for action in actions:
            if isinstance(action, Send) and isinstance(action.message, Fenced):
                self._fences[peer, action.message.epoch] = None
        while len(self._fences) > MAX_KEPT_FENCES:
            del self._fences[next(iter(self._fences))]
        return actions if peer in self._up else tuple(a for a in actions if not isinstance(a, Send))
