"""One ticket on the decode side, as a table: (state, event) -> (state, actions). Knows neither clocks nor block states.

    RESERVED ----open---> RECEIVING --all positions--> LANDED      (the blocks now belong to the sequence)
        |                     | abort, lease end, writer lost, bad manifest
        | abort               v
        |                QUARANTINED                               (skipped if the transport refuses late frames)
        v                     | fenced, or the writer's kernel closed its link 3 s ago, or forced
      ENDED <-----------------+                                    (the blocks are free)

The receiver cannot refuse a one-sided write, so it protects memory by when it reuses it: the end of a lease frees
nothing, only proof that the writer will write no more does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kvrelay.link import AbortedNotice, LandedNotice, Opened, OpenRefused, Renewed
from kvrelay.requests import Incarnation
from kvtransfer.actions import (
    Count,
    DropPrefix,
    Expect,
    FreeBlocks,
    HoldBlocks,
    LandedTicket,
    LostTicket,
    QuarantineBlocks,
    ReceiverAction,
    Reply,
    Unexpect,
    WriteBytes,
)
from kvtransfer.manifest import Manifest
from kvtransfer.receiver_ticket import (
    FORCED_S,
    PEER_GONE_S,
    AbortAsked,
    DataArrived,
    Event,
    FencedSaid,
    LinkClosed,
    LinkOpened,
    ManifestArrived,
    OpenAsked,
    ReceivingTicket,
    RenewAsked,
    Tick,
    TicketState,
)

Step = tuple[ReceivingTicket, tuple[ReceiverAction, ...]]
STALE = Count("refused_stale")


def step(t: ReceivingTicket, event: Event, now: float) -> Step:
    """The ticket after `event`, and what is to be done. Every (state, event type) is defined."""
    return TABLE[t.state, type(event)](t, event, now)


def _ignore(t: ReceivingTicket, _event: Event, _now: float) -> Step:
    return t, ()


def _stale(t: ReceivingTicket, _event: Event, _now: float) -> Step:
    return t, (STALE,)


# open and renew


def _open(t: ReceivingTicket, event: OpenAsked, now: float) -> Step:
    msg, writer = event.message, event.writer
    if msg.incarnation != t.ticket.incarnation:
        return _refuse(t, writer, "the ticket is of another incarnation")
    if (msg.request_id, msg.attempt) != (t.key.request_id, t.key.attempt):
        return _refuse(t, writer, "the ticket is of another request or attempt")
    t = replace(t, state=TicketState.RECEIVING, writer=writer, lease_until=now + t.rules.lease_s)
    opened = (Expect(t.ticket), Reply(writer, Opened(t.ticket.epoch, t.rules.lease_s)))
    if t.missing:
        return t, opened
    t, actions = _land(t)
    return t, opened + actions


def _open_again(t: ReceivingTicket, event: OpenAsked, _now: float) -> Step:
    if event.writer == t.writer:
        return t, (Count("duplicate_open"),)
    return _refuse(t, event.writer, "another writer has opened the ticket")


def _open_late(t: ReceivingTicket, event: OpenAsked, _now: float) -> Step:
    return _refuse(t, event.writer, f"the ticket is {t.state.value}")


def _refuse(t: ReceivingTicket, writer: Incarnation, reason: str) -> Step:
    return t, (STALE, Reply(writer, OpenRefused(t.ticket.epoch, reason)))


def _renew(t: ReceivingTicket, event: RenewAsked, now: float) -> Step:
    if event.writer != t.writer:
        return t, (STALE,)
    renewed = Reply(event.writer, Renewed(t.ticket.epoch, t.rules.lease_s))
    return replace(t, lease_until=now + t.rules.lease_s), (renewed,)


def _renew_quarantined(t: ReceivingTicket, event: RenewAsked, now: float) -> Step:
    """The writer lives and its writes have not ended: puts off only the forced end. It may start no write."""
    if event.writer != t.writer:
        return t, (STALE,)
    notice = Reply(event.writer, AbortedNotice(t.ticket.epoch, "the ticket is quarantined"))
    return replace(t, lease_until=now + t.rules.lease_s), (notice,)


# bytes and manifests


def _data(t: ReceivingTicket, event: DataArrived, now: float) -> Step:
    msg, position, end = event.message, event.message.position, event.message.offset + len(event.message.data)
    if not t.rules.bytes_over_link or event.writer != t.writer or position not in t.missing or position in t.filled:
        return t, (STALE,)
    expected_offset = t.filling[1] if t.filling is not None and t.filling[0] == position else 0
    if msg.offset != expected_offset or end > t.rules.block_bytes or not msg.data:
        return _lose(t, f"frame of bytes {msg.offset}..{end} does not continue position {position}", Count("bad_frame"))
    write = WriteBytes(t.ticket.table.block_ids[position], msg.offset, msg.data)
    if end == t.rules.block_bytes:
        return replace(t, filling=None, filled=t.filled | {position}), (write,)
    return replace(t, filling=(position, end)), (write,)


def _manifest(t: ReceivingTicket, event: ManifestArrived, now: float) -> Step:
    m = event.manifest
    if m.incarnation != t.ticket.incarnation or m.writer != t.writer or event.sender not in (None, t.writer):
        return t, (STALE,)
    if m.part in t.parts:
        return t, (Count("duplicate_part"),)
    wrong = _fault_of(t, m)
    if wrong:
        return _lose(t, wrong, Count("bad_manifest"))
    damaged = _damage_of(t, m)
    if damaged:
        return _lose(t, damaged, Count("bad_checksum"))
    t = replace(t, parts=t.parts | {m.part}, missing=t.missing.difference(m.positions))
    return (t, ()) if t.missing else _land(t)


def _fault_of(t: ReceivingTicket, m: Manifest) -> str:
    """What is wrong with a manifest of the right writer, or ''."""
    for position, block_id in zip(m.positions, m.block_ids, strict=True):
        if position not in t.expected:
            return f"manifest of part {m.part} names position {position} outside {t.expected}"
        if block_id != t.ticket.table.block_ids[position]:
            return f"manifest of part {m.part} names block {block_id} at position {position}, not the ticket's"
        if t.rules.bytes_over_link and position not in t.filled:
            return f"manifest of part {m.part} names position {position} whose bytes have not all arrived"
    if t.rules.checksum_of is not None and not m.checksums:
        return f"manifest of part {m.part} carries no checksums"
    return ""


def _damage_of(t: ReceivingTicket, m: Manifest) -> str:
    """Which block does not hold what the writer sent, or ''. Reads every byte, if blocks are checked at all."""
    checksum_of = t.rules.checksum_of
    if checksum_of is not None:
        for position, block_id, checksum in zip(m.positions, m.block_ids, m.checksums, strict=True):
            if checksum_of(block_id) != checksum:
                return f"part {m.part}: block {block_id} at position {position} has another checksum"
    return ""


def _land(t: ReceivingTicket) -> Step:
    assert t.writer is not None
    epoch = t.ticket.epoch
    return replace(t, state=TicketState.LANDED), (
        HoldBlocks(epoch, t.promised),
        Unexpect(epoch),
        LandedTicket(t.key, epoch),
        Reply(t.writer, LandedNotice(epoch)),
    )


# the ways out


def _abort_reserved(t: ReceivingTicket, _event: Event, _now: float) -> Step:
    return replace(t, state=TicketState.ENDED), (*_drop_prefix(t), FreeBlocks(t.ticket.epoch, t.promised))


def _abort_receiving(t: ReceivingTicket, _event: Event, _now: float) -> Step:
    return _stop(t, "aborted")


def _lose(t: ReceivingTicket, reason: str, *counts: Count) -> Step:
    """Receiving failed: as an abort, and the coordinator is told."""
    t, actions = _stop(t, reason)
    return t, (*counts, *actions, LostTicket(t.key, t.ticket.epoch, reason))


def _stop(t: ReceivingTicket, reason: str) -> Step:
    """RECEIVING -> QUARANTINED, or ENDED where a late frame would be refused. The writer is asked to stop."""
    assert t.writer is not None
    epoch = t.ticket.epoch
    notice = Reply(t.writer, AbortedNotice(epoch, reason))
    if t.rules.refuses_late:
        t, ended = _end(t)
        return t, (*_drop_prefix(t), *ended, notice)
    quarantine = (QuarantineBlocks(epoch, t.promised), Count("quarantined"))
    return replace(t, state=TicketState.QUARANTINED), (*_drop_prefix(t), *quarantine, notice)


def _end(t: ReceivingTicket, *counts: Count) -> Step:
    epoch = t.ticket.epoch
    return replace(t, state=TicketState.ENDED), (*counts, Unexpect(epoch), FreeBlocks(epoch, t.promised))


def _drop_prefix(t: ReceivingTicket) -> tuple[DropPrefix, ...]:
    cached = t.ticket.table.block_ids[: t.ticket.num_cached_blocks]
    return (DropPrefix(t.ticket.epoch, cached),) if cached else ()


def _fenced_receiving(t: ReceivingTicket, event: FencedSaid, now: float) -> Step:
    """The writer gave up: it is lost and, since its writes have ended, the blocks come back at once."""
    if event.writer != t.writer:
        return t, (STALE,)
    t, lost = _lose(t, "the writer gave up")
    if t.state is TicketState.ENDED:
        return t, lost
    t, ended = _end(t)
    return t, lost + ended


def _fenced_quarantined(t: ReceivingTicket, event: FencedSaid, _now: float) -> Step:
    return _end(t) if event.writer == t.writer else (t, (STALE,))


def _closed_receiving(t: ReceivingTicket, event: LinkClosed, now: float) -> Step:
    if event.writer != t.writer:
        return t, ()
    t, actions = _lose(t, "the link to the writer was lost")
    return (t if t.state is TicketState.ENDED else _note_closed(t, event, now)), actions


def _closed_quarantined(t: ReceivingTicket, event: LinkClosed, now: float) -> Step:
    return _note_closed(t, event, now), ()


def _note_closed(t: ReceivingTicket, event: LinkClosed, now: float) -> ReceivingTicket:
    """A link that we closed, or lost without a word, proves nothing about the writer."""
    if event.writer != t.writer or not event.by_peer_kernel or t.gone_at is not None:
        return t
    return replace(t, gone_at=now + PEER_GONE_S)


def _reopened(t: ReceivingTicket, event: LinkOpened, _now: float) -> Step:
    """The writer's incarnation dialled again, so it lives: the closed link was no proof of its death."""
    return (replace(t, gone_at=None) if event.writer == t.writer else t), ()


def _tick_receiving(t: ReceivingTicket, _event: Event, now: float) -> Step:
    return _lose(t, "the writer's lease ended", Count("lease_expired")) if now >= t.lease_until else (t, ())


def _tick_quarantined(t: ReceivingTicket, _event: Event, now: float) -> Step:
    if t.gone_at is not None and now >= t.gone_at:
        return _end(t)
    return _end(t, Count("forced")) if now >= t.lease_until + FORCED_S else (t, ())


_S = TicketState
_ROWS: dict[type[Event], tuple[Callable[[ReceivingTicket, Any, float], Step], ...]] = {
    # event          RESERVED         RECEIVING          LANDED      QUARANTINED          ENDED
    OpenAsked:       (_open,           _open_again,       _open_late, _open_late,          _open_late),
    RenewAsked:      (_stale,          _renew,            _ignore,    _renew_quarantined,  _ignore),
    DataArrived:     (_stale,          _data,             _stale,     _stale,              _stale),
    ManifestArrived: (_stale,          _manifest,         _stale,     _stale,              _stale),
    FencedSaid:      (_stale,          _fenced_receiving, _ignore,    _fenced_quarantined, _ignore),
    AbortAsked:      (_abort_reserved, _abort_receiving,  _ignore,    _ignore,             _ignore),
    LinkOpened:      (_ignore,         _ignore,           _ignore,    _reopened,           _ignore),
    LinkClosed:      (_ignore,         _closed_receiving, _ignore,    _closed_quarantined, _ignore),
    Tick:            (_ignore,         _tick_receiving,   _ignore,    _tick_quarantined,   _ignore),
}  # fmt: skip
TABLE = {(state, event): handler for event, row in _ROWS.items() for state, handler in zip(_S, row, strict=True)}
