"""The prefill side of hand-offs: what may be written when, and when sources may be reused."""

from __future__ import annotations

import enum
from collections.abc import Callable

from kvrelay.blocks import Ticket
from kvrelay.link import AbortedNotice, LandedNotice, Opened, OpenRefused, Renewed, ToPrefill
from kvrelay.requests import Incarnation, SequenceKey
from kvtransfer.actions import WriterAction
from kvtransfer.transports.base import WriteDone, WriteFailed

Actions = tuple[WriterAction, ...]


class WriterState(enum.Enum):
    OPENING = "opening"
    OPEN = "open"
    CLOSING = "closing"
    ENDED = "ended"


class WriterTable:
    """Every ticket a prefill worker writes to. Signatures first; every method returns actions and changes only the table."""

    def __init__(
        self,
        incarnation: Incarnation,
        block_bytes: int,
        *,
        refuses_late: bool = False,
        checksum_of: Callable[[int], int] | None = None,
    ) -> None: ...

    def start(self, ticket: Ticket, peer: Incarnation, key: SequenceKey, num_tokens: int, now: float) -> Actions: ...
    def part_ready(
        self,
        peer: Incarnation,
        epoch: int,
        positions: tuple[int, ...],
        source_ids: tuple[int, ...],
        last: bool,
        now: float,
    ) -> Actions: ...
    def received(self, peer: Incarnation, message: ToPrefill, now: float) -> Actions: ...
    def opened(self, peer: Incarnation, msg: Opened, now: float) -> Actions: ...
    def open_refused(self, peer: Incarnation, msg: OpenRefused, now: float) -> Actions: ...
    def renewed(self, peer: Incarnation, msg: Renewed, now: float) -> Actions: ...
    def landed(self, peer: Incarnation, msg: LandedNotice, now: float) -> Actions: ...
    def aborted(self, peer: Incarnation, msg: AbortedNotice, now: float) -> Actions: ...
    def abort(self, peer: Incarnation, epoch: int, now: float) -> Actions: ...
    def transport_event(self, event: WriteDone | WriteFailed, now: float) -> Actions: ...
    def write_done(self, peer: Incarnation, epoch: int, part: int, now: float) -> Actions: ...
    def write_failed(
        self, peer: Incarnation, epoch: int, part: int, error: str, now: float, *, posted: bool = True
    ) -> Actions: ...
    def link_opened(self, peer: Incarnation, now: float) -> Actions: ...
    def link_lost(self, peer: Incarnation, now: float) -> Actions: ...
    def tick(self, now: float) -> Actions: ...
    def next_deadline(self) -> float | None: ...
    def counts(self) -> dict[WriterState, int]: ...
    @property
    def in_flight(self) -> int: ...
