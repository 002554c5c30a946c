"""Which prefill and which decode worker take a request: a pure function of a snapshot. Knows no sessions and no clocks.

Prefill goes to the worker with the fewest tokens still to compute, decode to the one with the fewest sequences, then
the most free blocks. Ties go to the worker that was given a request longest ago, then to the smaller id. A worker whose
whole pool is too small for a request is passed over while there is a larger one: pools may differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from coordinator.events import Placement
from kvrelay.blocks import blocks_for
from kvrelay.requests import WorkerId

TICKET_BUDGETS = 2
"""Chunk budgets of ticketed tokens that a prefill worker may have at once; one request on an idle one always may."""
PASS_S = 2.0
"""How long smaller requests may pass a blocked head of the queue."""
LOOK_AHEAD = 64
"""How many requests behind a blocked head are looked at."""


@dataclass(frozen=True, slots=True)
class PrefillView:
    """queued_tokens: reported and not yet computed, plus what was assigned and is not in a report yet.

    ticketed_tokens: the part of it that came from this coordinator. total_blocks: of the pool, 0 if unknown.
    """

    worker_id: WorkerId
    queued_tokens: int = 0
    ticketed_tokens: int = 0
    step_tokens: int = 512
    usable: bool = True
    last_assigned: int = 0
    total_blocks: int = 0
    block_size: int = 16


@dataclass(frozen=True, slots=True)
class DecodeView:
    """sequences and free_blocks count what was assigned and is not in a report yet. total: blocks of the pool."""

    worker_id: WorkerId
    address: str
    sequences: int = 0
    max_sequences: int = 256
    free_blocks: int = 0
    total_blocks: int = 0
    block_size: int = 16
    usable: bool = True
    last_assigned: int = 0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What the router may know. usable is false for workers that drain or stall."""

    prefill: tuple[PrefillView, ...]
    decode: tuple[DecodeView, ...]


@dataclass(frozen=True, slots=True)
class Want:
    """What the router needs to know of a request. needs_decode is false when the next token is all there is.

    num_tokens: to be computed now; last_slots: token slots that the request fills if it goes on to its last token.
    """

    num_tokens: int
    needs_decode: bool = True
    blocked_since: float | None = None
    not_before: float = 0.0
    last_slots: int = 0
    avoid: tuple[WorkerId | None, ...] = ()


def route(snapshot: Snapshot, want: Want, local_prefill_below: int = 0) -> Placement | None:
    """A placement that has room now, or None. Prompts under `local_prefill_below` are computed by decode itself."""
    local = want.needs_decode and want.num_tokens < local_prefill_below
    prefill = None if local else _pick_prefill(snapshot.prefill, want)
    if prefill is None and not local:
        return None
    if not want.needs_decode:
        return Placement(prefill.worker_id if prefill else None, None)
    decode = _pick_decode(snapshot.decode, want)
    if decode is None:
        return None
    return Placement(prefill.worker_id if prefill else None, decode.worker_id, decode.address)


def next_to_place(
    queue: Sequence[Want], snapshot: Snapshot, now: float, local_prefill_below: int = 0
) -> tuple[int, Placement] | None:
    """Position in the queue and placement of the request to place next, None when nobody can be placed now.

    First come, first served; past a head that has been blocked for less than PASS_S, smaller requests may go.
    """
    head: Want | None = None
    for position, want in enumerate(queue[:LOOK_AHEAD]):
        if want.not_before > now:
            continue
        if head is not None and want.num_tokens >= head.num_tokens:
            continue
        placement = route(snapshot, want, local_prefill_below)
        if placement is not None:
            return position, placement
        if head is None:
            head = want
            if want.blocked_since is not None and now - want.blocked_since >= PASS_S:
                return None
    return None


def _pick_prefill(views: Sequence[PrefillView], want: Want) -> PrefillView | None:
    num_tokens = want.num_tokens
    having_room = [
        view
        for view in _large_enough(views, num_tokens)
        if view.usable
        and (view.ticketed_tokens == 0 or view.ticketed_tokens + num_tokens <= TICKET_BUDGETS * view.step_tokens)
    ]
    return min(
        having_room,
        key=lambda v: (v.worker_id in want.avoid, v.queued_tokens, v.last_assigned, v.worker_id),
        default=None,
    )


def _pick_decode(views: Sequence[DecodeView], want: Want) -> DecodeView | None:
    """An empty worker always takes one: what none can hold at all was refused before the queue."""
    having_room = [
        view
        for view in _large_enough(views, want.last_slots)
        if view.usable
        and view.sequences < view.max_sequences
        and (view.sequences == 0 or blocks_for(want.num_tokens + 1, view.block_size) <= view.free_blocks)
    ]
    return min(
        having_room,
        key=lambda v: (v.worker_id in want.avoid, v.sequences, -v.free_blocks, v.last_assigned, v.worker_id),
        default=None,
    )


V = TypeVar("V", PrefillView, DecodeView)


def _large_enough(views: Sequence[V], slots: int) -> Sequence[V]:
    """Those whose empty pool would hold so many tokens, or all when none would: then a worker says why not."""
    fitting = [v for v in views if v.total_blocks == 0 or blocks_for(slots, v.block_size) <= v.total_blocks]
    return fitting or views
