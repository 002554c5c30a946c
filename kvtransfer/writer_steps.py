"""One ticket on the prefill side, as a table: (state, event) -> (state, actions). Knows neither clocks nor transports.

    OPENING --opened--> OPEN --landed, every write done--> ENDED (finished)
       |                  | abort of either side, lease end, failed write, link lost
       | refused          v
       |               CLOSING: posts nothing any more, waits for its writes
       v                  | every posted write ended: says fenced
     ENDED <--------------+  (failed)

A posted part keeps its references on its sources until its own write ended. Fenced is said only when every posted
write ended done. A write that ended in any other way against a live peer may still land there: the process exits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kvrelay.link import LEASE_MARGIN_S, LEASE_S, Fenced, OpenTicket, Renew
from kvtransfer.actions import Count, ExitProcess, Failed, Finished, Post, PushStats, Release, Send, WriterAction
from kvtransfer.manifest import Manifest, encode
from kvtransfer.transports.base import Part
from kvtransfer.writer_ticket import (
    FAILED_WRITE_VERDICT_S,
    STUCK_WRITE_S,
    AbortWanted,
    Event,
    HasLanded,
    LinkLost,
    LinkOpened,
    PartReady,
    QueuedPart,
    Tick,
    WasAborted,
    WasOpened,
    WasRefused,
    WasRenewed,
    WriterState,
    WritingTicket,
    WroteDone,
    WroteFailed,
)

Step = tuple[WritingTicket, tuple[WriterAction, ...]]
UNEXPECTED = Count("unexpected_message")


def step(t: WritingTicket, event: Event, now: float) -> Step:
    """The ticket after `event`, and what is to be done. Every (state, event type) is defined."""
    return TABLE[t.state, type(event)](t, event, now)


def _ignore(t: WritingTicket, _event: Event, _now: float) -> Step:
    return t, ()


def _unexpected(t: WritingTicket, _event: Event, _now: float) -> Step:
    return t, (UNEXPECTED,)


# parts


def _queue(t: WritingTicket, event: PartReady, now: float) -> Step:
    """Takes over one reference of each source."""
    if len(event.positions) != len(event.source_ids):
        raise ValueError(f"{len(event.positions)} positions for {len(event.source_ids)} source blocks")
    fresh = frozenset(event.positions)
    if len(fresh) != len(event.positions) or fresh & t.given or not all(p in t.expected for p in fresh):
        raise ValueError(f"positions {event.positions} are outside {t.expected} or were given before")
    if not fresh:
        return t, ()
    part = QueuedPart(t.next_part, event.positions, event.source_ids, event.last)
    t = replace(t, given=t.given | fresh, next_part=t.next_part + 1, queued=(*t.queued, part))
    return _post_queued(t, now) if t.state is WriterState.OPEN else (t, ())


def _post_queued(t: WritingTicket, now: float) -> Step:
    """Post what waits, unless the lease is about to end: then a renewal must come first."""
    if not t.queued or now >= t.lease_until - LEASE_MARGIN_S:
        return t, ()
    posts = tuple(Post(_part(t, queued)) for queued in t.queued)
    moved_at = t.moved_at if t.posted else now
    return replace(t, queued=(), posted=t.posted + t.queued, moved_at=moved_at), posts


def _part(t: WritingTicket, queued: QueuedPart) -> Part:
    dest_ids = tuple(t.ticket.table.block_ids[p] for p in queued.positions)
    checksum_of = t.rules.checksum_of
    manifest = Manifest(
        epoch=t.ticket.epoch,
        incarnation=t.peer,
        writer=t.rules.incarnation,
        part=queued.part,
        positions=queued.positions,
        block_ids=dest_ids,
        last_part=queued.last,
        checksums=() if checksum_of is None else tuple(checksum_of(i) for i in queued.source_ids),
    )
    return Part(t.peer, t.ticket.epoch, queued.part, queued.positions, queued.source_ids, dest_ids, encode(manifest))


def _give_back(t: WritingTicket, event: PartReady, _now: float) -> Step:
    return t, ((Release(event.source_ids),) if event.source_ids else ())


# the lease


def _ask_to_open(t: WritingTicket, _event: LinkOpened, now: float) -> Step:
    """The lease counts from now, before open is sent."""
    if t.open_sent:
        return t, ()
    t = replace(t, open_sent=True, asked_at=now, lease_until=now + LEASE_S)
    return t, (Send(t.peer, OpenTicket(t.ticket.epoch, t.peer, t.key.request_id, t.key.attempt)),)


def _opened(t: WritingTicket, event: WasOpened, now: float) -> Step:
    if t.asked_at is None:
        return t, (UNEXPECTED,)
    return _leased(replace(t, state=WriterState.OPEN, moved_at=now), event.lease_s, now)


def _renewed(t: WritingTicket, event: WasRenewed, now: float) -> Step:
    return _leased(t, event.lease_s, now)


def _leased(t: WritingTicket, lease_s: float, now: float) -> Step:
    if t.asked_at is None:
        return t, (UNEXPECTED,)
    if not lease_s > 0:  # also NaN
        return _close(t, f"the peer granted a lease of {lease_s} s", now)
    lease_s = min(lease_s, LEASE_S)
    t = replace(t, lease_until=t.asked_at + lease_s, renew_at=t.asked_at + lease_s / 3, asked_at=None)
    return _post_queued(t, now)


def _renew_if_due(t: WritingTicket, now: float) -> Step:
    if t.asked_at is not None or now < t.renew_at or t.link_lost_at is not None:
        return t, ()
    return replace(t, asked_at=now), (Send(t.peer, Renew(t.ticket.epoch)),)


# endings


def _refused(t: WritingTicket, event: WasRefused, _now: float) -> Step:
    """Decode holds nothing for us: there is nothing to fence."""
    reason = f"open was refused: {event.reason}"
    sources = _sources(t.queued)
    return replace(t, state=WriterState.ENDED, queued=(), told=True), (*sources, _failed(t, reason))


def _close(t: WritingTicket, reason: str, now: float) -> Step:
    """Post nothing any more. The attempt has failed, which is said at once; writes in flight are waited for."""
    actions: tuple[WriterAction, ...] = _sources(t.queued)
    if not t.told:
        actions += (_failed(t, reason),)
    closing_at = now if t.closing_at is None else t.closing_at
    t = replace(t, state=WriterState.CLOSING, queued=(), told=True, closing_at=closing_at)
    t, settled = _settle(t, now)
    return t, actions + settled


def _settle(t: WritingTicket, now: float) -> Step:
    """CLOSING -> ENDED once no write of ours is open and none ended doubtfully."""
    if t.state is not WriterState.CLOSING or t.posted or t.failed or t.doomed:
        return t, ()
    t = replace(t, state=WriterState.ENDED)
    if t.told:
        fenced = Send(t.peer, Fenced(t.ticket.epoch))
        return t, ((fenced,) if t.clean and t.open_sent else ())
    assert t.landed_at is not None
    num_bytes = t.blocks_done * t.rules.block_bytes
    stats = PushStats(t.parts_done, t.blocks_done, num_bytes, t.write_s, t.landed_at)
    return t, (Finished(t.key, t.peer, t.ticket.epoch, stats),)


def _failed(t: WritingTicket, reason: str) -> Failed:
    return Failed(t.key, t.peer, t.ticket.epoch, reason)


def _sources(parts: tuple[QueuedPart, ...]) -> tuple[Release, ...]:
    return tuple(Release(part.source_ids) for part in parts)


def _landed(t: WritingTicket, _event: HasLanded, now: float) -> Step:
    """Decode has everything; our own writes may still have to be seen as done before their sources are reused."""
    if t.queued or not t.is_given:
        t, actions = _close(t, "the peer said landed before every block was written", now)
        return t, (UNEXPECTED, *actions)
    return _settle(replace(t, state=WriterState.CLOSING, landed_at=now, closing_at=now), now)


def _aborted(t: WritingTicket, event: WasAborted, now: float) -> Step:
    return _close(t, f"decode aborted: {event.reason}", now)


def _answered_closing(t: WritingTicket, _event: WasRenewed | WasAborted, _now: float) -> Step:
    """A renewal was answered (by aborted if decode has quarantined the ticket): the next is due a third later."""
    if t.asked_at is None:
        return t, ()
    return replace(t, asked_at=None, renew_at=t.asked_at + LEASE_S / 3), ()


def _abort(t: WritingTicket, _event: AbortWanted, now: float) -> Step:
    return _close(t, "aborted", now)


# writes


def _write_done(t: WritingTicket, event: WroteDone, now: float) -> Step:
    part, t = _take_posted(t, event.part)
    if part is None:
        return t, (Count("unexpected_write_end"),)
    blocks = t.blocks_done + len(part.source_ids)
    write_s = t.write_s + event.seconds
    t = replace(t, parts_done=t.parts_done + 1, blocks_done=blocks, write_s=write_s, moved_at=now)
    t, settled = _settle(t, now)
    return t, (Release(part.source_ids), *settled)


def _write_failed(t: WritingTicket, event: WroteFailed, now: float) -> Step:
    """A write never begun, or one whose receiver refuses late frames, cannot land any more: it has ended."""
    part, t = _take_posted(t, event.part)
    if part is None:
        return t, (Count("unexpected_write_end"),)
    reason = f"write of part {event.part} failed: {event.error}"
    if not event.posted or t.rules.refuses_late:
        t, actions = _close(t, reason, now)
        return t, (Count("write_failed"), Release(part.source_ids), *actions)
    t, actions = _close(replace(t, failed=(*t.failed, part), failed_at=now), reason, now)
    if t.relinked and not t.doomed:
        t, doom = _doom(t, "a write failed and its decode worker lives")
        actions += doom
    return t, (Count("write_failed"), *actions)


def _take_posted(t: WritingTicket, number: int) -> tuple[QueuedPart | None, WritingTicket]:
    part = next((p for p in t.posted if p.part == number), None)
    return part, replace(t, posted=tuple(p for p in t.posted if p.part != number))


# the link


def _link_lost(t: WritingTicket, event: LinkLost, now: float) -> Step:
    why = f": {event.reason}" if event.reason else ""
    t = replace(t, link_lost_at=now, peer_dead=event.peer_dead)
    return _close(t, f"the link to the decode worker was lost{why}", now)


def _link_lost_closing(t: WritingTicket, event: LinkLost, now: float) -> Step:
    lost_at = now if t.link_lost_at is None else t.link_lost_at
    return replace(t, link_lost_at=lost_at, relinked=False, peer_dead=t.peer_dead or event.peer_dead), ()


def _link_opened_closing(t: WritingTicket, _event: LinkOpened, _now: float) -> Step:
    """The peer lives. Its end of the lost link told it that we are dead: it will not wait for what failed to land.

    Writes still in flight keep their bound, since the peer's may have run out already.
    """
    if t.link_lost_at is None:
        return t, ()
    t = replace(t, relinked=True)
    return _doom(t, "a write failed and its decode worker lives") if t.failed else (t, ())


def _doom(t: WritingTicket, reason: str) -> Step:
    return replace(t, doomed=True), (ExitProcess(f"ticket {t.ticket.epoch} of {t.peer}: {reason}"),)


# time


def _tick_opening(t: WritingTicket, _event: Tick, now: float) -> Step:
    return _close(t, "open was not answered within a lease", now) if now >= t.lease_until else (t, ())


def _tick_open(t: WritingTicket, event: Tick, now: float) -> Step:
    """Renewals alone show only that the link lives. Writes to one peer may stand in line, of all its tickets."""
    if now >= t.lease_until:
        return _close(t, "the lease ended without a renewal", now)
    if t.posted and now >= max(t.moved_at, event.wrote_at) + STUCK_WRITE_S:
        return _close(t, f"no write to the decode worker ended for {STUCK_WRITE_S:.0f} s", now)
    if t.is_written and now >= t.moved_at + STUCK_WRITE_S:
        return _close(t, f"all was written {STUCK_WRITE_S:.0f} s ago and the decode worker has not all of it", now)
    return _renew_if_due(t, now)


def _tick_closing(t: WritingTicket, event: Tick, now: float) -> Step:
    if t.doomed:
        return t, ()
    if t.link_lost_at is None:
        if t.failed and now >= t.failed_at + FAILED_WRITE_VERDICT_S:
            return _doom(t, "a write failed and its decode worker lives")
        assert t.closing_at is not None, "a closing ticket began to close"
        if t.posted and now >= _still_since(t, event, t.closing_at) + STUCK_WRITE_S:
            return _doom(t, "a write does not end")
        return _renew_if_due(t, now)
    if t.posted and now >= _still_since(t, event, t.link_lost_at) + t.exit_s:
        return _doom(t, "a write outlived the link to its decode worker")
    if not t.posted and now >= t.link_lost_at + t.hold_s:
        if t.failed and not t.peer_dead:
            return _doom(t, "a write failed, and nothing proves that its decode worker is dead")
        sources = _sources(t.failed)
        t, settled = _settle(replace(t, failed=(), clean=t.clean and not t.failed), now)
        return t, sources + settled
    return t, ()


def _still_since(t: WritingTicket, event: Tick, since: float) -> float:
    """Since when a write of a closing ticket has been waited for. Over a link, the next one too if it is lost and there
    again, they wait for those before them."""
    return max(since, event.wrote_at) if t.rules.refuses_late else since


_S = WriterState
_ROWS: dict[type[Event], tuple[Callable[[WritingTicket, Any, float], Step], ...]] = {
    # event      OPENING        OPEN           CLOSING                ENDED
    PartReady:   (_queue,        _queue,        _give_back,            _give_back),
    WasOpened:   (_opened,       _unexpected,   _ignore,               _ignore),
    WasRefused:  (_refused,      _unexpected,   _ignore,               _ignore),
    WasRenewed:  (_unexpected,   _renewed,      _answered_closing,     _ignore),
    HasLanded:   (_unexpected,   _landed,       _ignore,               _ignore),
    WasAborted:  (_aborted,      _aborted,      _answered_closing,     _ignore),
    AbortWanted: (_abort,        _abort,        _ignore,               _ignore),
    WroteDone:   (_write_done,   _write_done,   _write_done,           _unexpected),
    WroteFailed: (_write_failed, _write_failed, _write_failed,         _unexpected),
    LinkLost:    (_link_lost,    _link_lost,    _link_lost_closing,    _ignore),
    LinkOpened:  (_ask_to_open,  _ignore,       _link_opened_closing,  _ignore),
    Tick:        (_tick_opening, _tick_open,    _tick_closing,         _ignore),
}  # fmt: skip
TABLE = {(state, event): handler for event, row in _ROWS.items() for state, handler in zip(_S, row, strict=True)}
