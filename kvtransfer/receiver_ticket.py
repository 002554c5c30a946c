"""The state of one ticket on the decode side, and what can happen to it. Values only; decides nothing."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

from kvrelay.blocks import Ticket
from kvrelay.link import LEASE_S, BlockData, OpenTicket
from kvrelay.requests import Incarnation, SequenceKey
from kvtransfer.manifest import Manifest

PEER_GONE_S = 3.0
"""Blocks come back this long after the writer's kernel closed its link: what it had on the wire has landed by then."""
FORCED_S = 30.0
"""A lost host that never closes its link is taken for dead this long after its last lease ended."""


class TicketState(enum.Enum):
    RESERVED = "reserved"
    RECEIVING = "receiving"
    LANDED = "landed"
    QUARANTINED = "quarantined"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class ReceiverRules:
    """What is equal for all tickets of a decode worker. block_bytes bounds frames; see ReceiverTable for the rest."""

    block_bytes: int
    refuses_late: bool = False
    bytes_over_link: bool = False
    lease_s: float = LEASE_S
    checksum_of: Callable[[int], int] | None = None


@dataclass(frozen=True, slots=True)
class ReceivingTicket:
    """A ticket and how far it got. missing: logical positions no valid manifest has named yet.

    lease_until: end of the writer's lease by our clock. gone_at: when the blocks come back because the writer's
    kernel closed its link. filling: (position, next byte) of the block whose frames are arriving; filled: positions
    all of whose bytes came over the link.
    """

    ticket: Ticket
    key: SequenceKey
    rules: ReceiverRules
    expected: range
    missing: frozenset[int]
    state: TicketState = TicketState.RESERVED
    writer: Incarnation | None = None
    parts: frozenset[int] = frozenset()
    lease_until: float = 0.0
    gone_at: float | None = None
    filling: tuple[int, int] | None = None
    filled: frozenset[int] = frozenset()

    @property
    def promised(self) -> tuple[int, ...]:
        """The ids of the blocks reserved for this ticket: all but its cached prefix."""
        return self.ticket.table.block_ids[self.ticket.num_cached_blocks :]

    def deadline(self) -> float | None:
        """When a tick would change something, None if none would."""
        if self.state is TicketState.RECEIVING:
            return self.lease_until
        if self.state is TicketState.QUARANTINED:
            forced_at = self.lease_until + FORCED_S
            return forced_at if self.gone_at is None else min(self.gone_at, forced_at)
        return None


@dataclass(frozen=True, slots=True)
class OpenAsked:
    writer: Incarnation
    message: OpenTicket


@dataclass(frozen=True, slots=True)
class RenewAsked:
    writer: Incarnation


@dataclass(frozen=True, slots=True)
class DataArrived:
    writer: Incarnation
    message: BlockData


@dataclass(frozen=True, slots=True)
class ManifestArrived:
    """sender: who sent it by the transport's word; None if the transport cannot say."""

    sender: Incarnation | None
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class FencedSaid:
    writer: Incarnation


@dataclass(frozen=True, slots=True)
class AbortAsked:
    pass


@dataclass(frozen=True, slots=True)
class LinkOpened:
    writer: Incarnation


@dataclass(frozen=True, slots=True)
class LinkClosed:
    writer: Incarnation
    by_peer_kernel: bool


@dataclass(frozen=True, slots=True)
class Tick:
    pass


Event = (
    OpenAsked | RenewAsked | DataArrived | ManifestArrived | FencedSaid | AbortAsked | LinkOpened | LinkClosed | Tick
)
