"""Every ticket of a decode worker, and the one way its messages reach the ticket they mean. Knows no block states.

All methods return actions in the order in which they are to be carried out and change nothing but the table.
What is of another epoch, incarnation or writer is dropped and counted; what is malformed never raises.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

from kvrelay.blocks import Ticket
from kvrelay.errors import InvalidArgument
from kvrelay.link import LEASE_S, BlockData, Fenced, OpenRefused, OpenTicket, PartManifest, Renew, ToDecode
from kvrelay.requests import Incarnation, SequenceKey
from kvtransfer.actions import Count, ReceiverAction, Reply
from kvtransfer.manifest import Manifest, decode
from kvtransfer.receiver_steps import STALE, step
from kvtransfer.receiver_ticket import (
    AbortAsked,
    DataArrived,
    Event,
    FencedSaid,
    LinkClosed,
    LinkOpened,
    ManifestArrived,
    OpenAsked,
    ReceiverRules,
    ReceivingTicket,
    RenewAsked,
    Tick,
    TicketState,
)

Actions = tuple[ReceiverAction, ...]
LATE_TICK_S = 0.5
"""A tick this late says nothing about the writers: their renewals may be waiting behind it."""

__all__ = ["Actions", "ReceiverTable", "TicketState"]


class ReceiverTable:
    """The tickets from reserve until they landed or ended; then the table forgets them.

    refuses_late: the transport refuses a write after its ticket ended, so nothing is quarantined.
    bytes_over_link: blocks arrive as BlockData; a manifest counts only if all bytes it names have arrived.
    checksum_of: CRC-32 of a block of our pool; if given, every manifest must carry checksums, and they are checked.
    """

    def __init__(
        self,
        incarnation: Incarnation,
        block_bytes: int,
        *,
        refuses_late: bool = False,
        bytes_over_link: bool = False,
        lease_s: float = LEASE_S,
        checksum_of: Callable[[int], int] | None = None,
    ) -> None:
        self._incarnation = incarnation
        self._rules = ReceiverRules(block_bytes, refuses_late, bytes_over_link, lease_s, checksum_of)
        self._tickets: dict[int, ReceivingTicket] = {}
        self._spared: set[int] = set()

    def reserve(self, ticket: Ticket, num_tokens: int, key: SequenceKey, now: float) -> Actions:
        """Take in a ticket for a prompt of num_tokens. Its blocks stay RESERVED until an action says else."""
        if ticket.epoch in self._tickets or ticket.incarnation != self._incarnation:
            raise ValueError(f"epoch {ticket.epoch} is in use or of another incarnation")
        if num_tokens > ticket.table.num_tokens:
            raise ValueError(f"a prompt of {num_tokens} tokens does not fit the ticket's {ticket.table.num_tokens}")
        expected = ticket.expected_positions(num_tokens)
        self._tickets[ticket.epoch] = ReceivingTicket(ticket, key, self._rules, expected, frozenset(expected))
        return ()

    def received(self, writer: Incarnation, message: ToDecode, now: float) -> Actions:
        """Any message of the link from `writer` but LinkHello, which is the worker's business."""
        match message:
            case OpenTicket():
                return self.open(writer, message, now)
            case Renew():
                return self.renew(writer, message.epoch, now)
            case Fenced():
                return self.fenced(writer, message.epoch, now)
            case BlockData():
                return self.block_data(writer, message, now)
            case PartManifest():
                return self.notification(writer, message.manifest, now)
        return (Count("unexpected_message"),)

    def open(self, writer: Incarnation, msg: OpenTicket, now: float) -> Actions:
        if msg.epoch not in self._tickets:
            return (STALE, Reply(writer, OpenRefused(msg.epoch, "no such ticket")))
        return self._apply(msg.epoch, OpenAsked(writer, msg), now)

    def renew(self, writer: Incarnation, epoch: int, now: float) -> Actions:
        """A renewal may cross the end of its ticket: then it is not answered."""
        return self._apply(epoch, RenewAsked(writer), now) if epoch in self._tickets else (Count("late_renew"),)

    def block_data(self, writer: Incarnation, msg: BlockData, now: float) -> Actions:
        """WriteBytes only if the ticket is open to `writer` and the frame continues a block it still misses."""
        return self._apply(msg.epoch, DataArrived(writer, msg), now)

    def manifest(self, writer: Incarnation | None, manifest: Manifest, now: float) -> Actions:
        """writer: who sent it, None if the transport cannot say (then the manifest's own word must fit the ticket)."""
        return self._apply(manifest.epoch, ManifestArrived(writer, manifest), now)

    def notification(self, writer: Incarnation | None, payload: bytes, now: float) -> Actions:
        """A manifest as bytes, as transports and the link bring it."""
        try:
            manifest = decode(payload)
        except InvalidArgument:
            return (Count("bad_manifest"),)
        return self.manifest(writer, manifest, now)

    def fenced(self, writer: Incarnation, epoch: int, now: float) -> Actions:
        return self._apply(epoch, FencedSaid(writer), now) if epoch in self._tickets else ()

    def abort(self, epoch: int, now: float) -> Actions:
        """The ticket is not wanted any more. Nothing if it landed: the sequence owns the blocks then."""
        return self._apply(epoch, AbortAsked(), now) if epoch in self._tickets else ()

    def link_opened(self, writer: Incarnation, now: float) -> Actions:
        """A link whose hello named this incarnation is up: the writer lives."""
        return self._apply_all(self._of(writer), LinkOpened(writer), now)

    def link_closed(self, writer: Incarnation, by_peer_kernel: bool, now: float) -> Actions:
        """by_peer_kernel: end of file or reset came from the other side; False if we closed it or gave up waiting."""
        return self._apply_all(self._of(writer), LinkClosed(writer, by_peer_kernel), now)

    def tick(self, now: float) -> Actions:
        """Looks at every ticket. Call it when next_deadline() has passed, after the messages that are waiting."""
        deadline = self.next_deadline()
        if deadline is None or now < deadline:
            return ()
        late = now - deadline > LATE_TICK_S
        actions: list[ReceiverAction] = [Count("late_tick")] if late else []
        for epoch, ticket in list(self._tickets.items()):
            if late and epoch not in self._spared and ticket.state is TicketState.RECEIVING:
                self._spared.add(epoch)
                spared_until = max(ticket.lease_until, now + LATE_TICK_S)
                self._tickets[epoch] = replace(ticket, lease_until=spared_until)
            actions += self._apply(epoch, Tick(), now)
        return tuple(actions)

    def next_deadline(self) -> float | None:
        """When tick() has something to do; None if only a message can change anything."""
        deadlines = (ticket.deadline() for ticket in self._tickets.values())
        return min((d for d in deadlines if d is not None), default=None)

    def counts(self) -> dict[TicketState, int]:
        """How many tickets are in each state now; landed and ended ones are forgotten and always 0."""
        found = Counter(ticket.state for ticket in self._tickets.values())
        return {state: found[state] for state in TicketState}

    @property
    def in_flight(self) -> int:
        """Tickets a writer may be writing to: RECEIVING and QUARANTINED."""
        return sum(t.state is not TicketState.RESERVED for t in self._tickets.values())

    def state(self, epoch: int) -> TicketState | None:
        """None once it landed or ended."""
        ticket = self._tickets.get(epoch)
        return None if ticket is None else ticket.state

    def _of(self, writer: Incarnation) -> list[int]:
        return [epoch for epoch, ticket in self._tickets.items() if ticket.writer == writer]

    def _apply_all(self, epochs: Iterable[int], event: Event, now: float) -> Actions:
        return tuple(action for epoch in epochs for action in self._apply(epoch, event, now))

    def _apply(self, epoch: int, event: Event, now: float) -> Actions:
        ticket = self._tickets.get(epoch)
        if ticket is None:
            return (STALE,)
        after, actions = step(ticket, event, now)
        if after.state in (TicketState.LANDED, TicketState.ENDED):
            del self._tickets[epoch]
            self._spared.discard(epoch)
        else:
            self._tickets[epoch] = after
        return actions
