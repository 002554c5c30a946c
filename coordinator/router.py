"""Which prefill and which decode worker take a request: a pure function of a snapshot. Knows no sessions and no clocks.

Costs are counted in tokens computed until token 0 is there. Those of a pair are the sum of what it costs on prefill and
what it costs on decode, so the best pair is the best of each role. Policies:
- cache_aware: prefill where the fewest tokens are queued and uncached; decode where the least must be moved and the
  load is lowest; a prefix that nobody caches goes where the queue, the load and then the pool are emptiest.
- least_loaded: prefill by queued tokens, decode by sequences, then by free blocks. round_robin: who was given a request
  longest ago. random: by a hash of the snapshot's serial.

All pass over workers without room, and one whose whole pool is too small while there is a larger one, and take one that
the request is to avoid only if there is no other. With no prefill worker but such that leave decode computes prompts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from coordinator.events import Placement
from coordinator.views import DecodeView, PrefillView, Share, Snapshot, Want
from kvrelay.blocks import blocks_for
from kvrelay.requests import Role, WorkerId

TICKET_BUDGETS = 2
"""Chunk budgets of ticketed tokens that a prefill worker may have at once; one request on an idle one always may.

A request may wait behind as many tokens more as are cached there of its own: sent elsewhere, it would compute them.
"""
MOVED_SHARE = 1 / 16
"""Cost of moving a token's KV against computing it: far less time on every machine measured, and most of it passes
while later tokens are computed; but a copy on another worker takes room there from prefixes that others want."""
SEQUENCE_TOKENS = 8
"""Cost of each sequence that a decode worker runs already: it makes every step longer. With MOVED_SHARE, one sequence
less elsewhere is worth moving 128 tokens, about a turn of a conversation."""
AHEAD = 4
"""One sequence more for so many rows of a decode worker is placed there before a row is free: a row would stand empty
from the end of one sequence until the next one's prompt is computed and has landed. Nobody goes behind others where a
row is free elsewhere."""
POOL_TOKENS = 64
"""Cost of a pool in full use, where sequences are preempted: that of eight sequences."""


@dataclass(frozen=True, slots=True)
class Rules:
    """policy: one of kvrelay.config.ROUTERS. Prompts with fewer uncached tokens than `local_prefill_below` are computed
    by decode itself."""

    policy: str = "cache_aware"
    local_prefill_below: int = 0


@dataclass(frozen=True, slots=True)
class Routed:
    """A placement, and what each of its workers gets to do. num_uncached: tokens that are computed, where they are."""

    placement: Placement
    num_tokens: int
    num_uncached: int
    num_sequences: int = 1

    def share(self, worker: WorkerId) -> Share:
        """Prefill computes; decode does so where there is no prefill."""
        computes = worker == self.placement.prefill or self.placement.prefill is None
        return Share(self.num_tokens, self.num_uncached if computes else 0, self.num_sequences)

    @property
    def roles(self) -> frozenset[Role]:
        """Of whose workers it takes one."""
        workers = ((Role.PREFILL, self.placement.prefill), (Role.DECODE, self.placement.decode))
        return frozenset(role for role, worker in workers if worker is not None)


DEFAULT_RULES = Rules()


def route(snapshot: Snapshot, want: Want, rules: Rules = DEFAULT_RULES) -> Routed | None:
    """A placement that has room now, or None. Caches are looked at only if somebody may have room."""
    alone = _is_alone(snapshot)
    want = _without_gone(snapshot, want)
    prefills, decodes = _with_room(snapshot, want)
    may_be_local = alone or (want.needs_decode and rules.local_prefill_below > 0)
    if ((want.needs_decode or alone) and not decodes) or not (prefills or may_be_local):
        return None
    look = _Look(want, rules.policy, snapshot.serial, _depths(snapshot, want, rules))
    if may_be_local:
        queue = None if alone else look.shortest_queue(snapshot.prefill)
        local = look.best_local(decodes, want.num_tokens + 1 if alone else rules.local_prefill_below, queue)
        if local is not None:
            return look.routed(None, local)
    prefill = look.best_prefill(prefills)
    if prefill is None:
        return None
    decode = look.best_decode(decodes) if want.needs_decode else None
    return look.routed(prefill, decode) if decode is not None or not want.needs_decode else None


def lacks(snapshot: Snapshot, want: Want, rules: Rules) -> frozenset[Role]:
    """The roles of which no worker has room for a request that cannot be placed."""
    look = _Look(want, rules.policy, snapshot.serial, _depths(snapshot, want, rules))
    prefills, decodes = _with_room(snapshot, want)
    alone = _is_alone(snapshot)
    on_decode = want.needs_decode or alone
    roles = {Role.DECODE} if on_decode and look.best_decode(decodes) is None else set()
    if not alone and look.best_prefill(prefills) is None:
        roles.add(Role.PREFILL)
    return frozenset(roles)


def _is_alone(snapshot: Snapshot) -> bool:
    """Whether decode does without prefill. One that is silent may come back in a moment; one that leaves will not."""
    return all(view.leaving for view in snapshot.prefill)


def _with_room(snapshot: Snapshot, want: Want) -> tuple[list[PrefillView], list[DecodeView]]:
    """Those that may have room, before anybody has looked into caches."""
    prefills = [v for v in _large_enough(snapshot.prefill, want.num_tokens) if _may_take(v, want)]
    return prefills, [v for v in _large_enough(snapshot.decode, want.last_slots) if _takes_more(v, want)]


Order = tuple[bool | float | int | str, ...]


@dataclass(frozen=True, slots=True)
class _Look:
    """One request against the workers. depths: blocks of its prompt that each caches."""

    want: Want
    policy: str
    serial: int
    depths: Mapping[WorkerId, int]

    def uncached(self, view: PrefillView | DecodeView) -> int:
        """Tokens to compute there: of a prompt that is cached to its end, the last one."""
        known = self.want.num_tokens
        return known - min(self.depths.get(view.worker_id, 0) * view.block_size, known - 1)

    def best_prefill(self, views: Sequence[PrefillView]) -> PrefillView | None:
        return min(filter(self._has_budget, views), key=self._prefill_order, default=None)

    def best_decode(self, views: Sequence[DecodeView]) -> DecodeView | None:
        return min(filter(self._has_blocks, views), key=self._decode_order, default=None)

    def best_local(self, views: Sequence[DecodeView], below: int, queue: int | None) -> DecodeView | None:
        """Of the workers that would have to compute fewer tokens than `below`, and to do so not behind more tokens than
        at prefill (queue: see there), nor behind sequences whose rows it needs; one that has it done in a step is soon
        enough anyhow."""
        few = [view for view in views if self.uncached(view) < below and self._has_blocks(view)]
        if queue is not None:
            few = [v for v in few if v.queued_tokens + self.uncached(v) <= max(queue, v.step_tokens)]
            few = [v for v in few if not _turns(v, self.want)]
        return min(few, key=self._local_order, default=None)

    def shortest_queue(self, views: Sequence[PrefillView]) -> int | None:
        """Tokens that the best prefill worker has to compute until this prompt is done; None without a usable one."""
        return min((view.queued_tokens + self.uncached(view) for view in views if view.usable), default=None)

    def routed(self, prefill: PrefillView | None, decode: DecodeView | None) -> Routed:
        computes = prefill or decode
        assert computes is not None, "a placement has a worker"
        placement = Placement(
            prefill.worker_id if prefill else None,
            decode.worker_id if decode else None,
            decode.address if decode else "",
        )
        return Routed(placement, self.want.num_tokens, self.uncached(computes), self.want.num_sequences)

    def _has_budget(self, view: PrefillView) -> bool:
        uncached = self.uncached(view)
        budget = TICKET_BUDGETS * view.step_tokens + self.want.num_tokens - uncached
        return view.ticketed_tokens == 0 or view.ticketed_tokens + uncached <= budget

    def _has_blocks(self, view: DecodeView) -> bool:
        """An empty worker always takes one: what none can hold at all was refused before the queue.

        Cached blocks that the request would use are in free_blocks, but for those that others use as well.
        """
        want = self.want
        shared = max(
            0, min(self.depths.get(view.worker_id, 0), want.num_tokens // view.block_size) - view.cached_blocks
        )
        need = blocks_for(want.num_tokens + 1, view.block_size) + want.num_sequences - 1 - shared
        return view.sequences == 0 or need <= view.free_blocks

    def _prefill_order(self, view: PrefillView) -> Order:
        cost: Order
        if self.policy == "cache_aware":
            cost = (view.queued_tokens + self.uncached(view), view.filled)
        else:
            cost = (view.queued_tokens,) if self.policy == "least_loaded" else self._draw(view)
        return (view.worker_id in self.want.avoid, *cost, view.last_assigned, view.worker_id)

    def _decode_order(self, view: DecodeView) -> Order:
        cost: Order
        if self.policy == "cache_aware":
            cost = (MOVED_SHARE * self.uncached(view) + _load(view), view.filled)
        else:
            cost = (view.sequences, -view.free_blocks) if self.policy == "least_loaded" else self._draw(view)
        turns = _turns(view, self.want)
        return (view.worker_id in self.want.avoid, turns, *cost, view.last_assigned, view.worker_id)

    def _local_order(self, view: DecodeView) -> Order:
        """Nothing is moved, and a prompt waits for those that came before it."""
        if self.policy != "cache_aware":
            return self._decode_order(view)
        turns, cost = _turns(view, self.want), view.queued_tokens + self.uncached(view) + _load(view)
        return (view.worker_id in self.want.avoid, turns, cost, view.filled, view.last_assigned, view.worker_id)

    def _draw(self, view: PrefillView | DecodeView) -> Order:
        """Nothing for round_robin, which is left to last_assigned."""
        if self.policy == "round_robin":
            return ()
        drawn = hashlib.blake2b(f"{self.serial} {view.worker_id}".encode(), digest_size=8).digest()
        return (int.from_bytes(drawn, "little"),)


def _depths(snapshot: Snapshot, want: Want, rules: Rules) -> Mapping[WorkerId, int]:
    return snapshot.index.depths(want.keys) if want.keys and rules.policy == "cache_aware" else {}


def _without_gone(snapshot: Snapshot, want: Want) -> Want:
    """Of two workers to avoid of which one is gone, that one was the trouble."""
    if len(want.avoid) < 2:
        return want
    here = {view.worker_id for view in snapshot.prefill} | {view.worker_id for view in snapshot.decode}
    return want if here.issuperset(want.avoid) else replace(want, avoid=())


def _load(view: DecodeView) -> float:
    return SEQUENCE_TOKENS * view.sequences + POOL_TOKENS * view.occupancy


def _may_take(view: PrefillView, want: Want) -> bool:
    """Whether it would take it if it cached all but a token of it."""
    budget = TICKET_BUDGETS * view.step_tokens + (want.num_tokens - 1 if want.keys else 0)
    return view.usable and (view.ticketed_tokens == 0 or view.ticketed_tokens < budget)


def _takes_more(view: DecodeView, want: Want) -> bool:
    rows = view.max_sequences + max(1, view.max_sequences // AHEAD)
    room = view.sequences + want.num_sequences <= rows and view.free_blocks > 0
    return view.usable and (view.sequences == 0 or room)


def _turns(view: DecodeView, want: Want) -> float:
    """How many times all its rows must become free until each of these sequences has one: 0 if they are free now."""
    return max(0, view.sequences + want.num_sequences - view.max_sequences) / view.max_sequences


V = TypeVar("V", PrefillView, DecodeView)


def _large_enough(views: Sequence[V], slots: int) -> Sequence[V]:
    """Those whose empty pool would hold so many tokens, or all when none would: then a worker says why not."""
    fitting = [v for v in views if v.total_blocks == 0 or blocks_for(slots, v.block_size) <= v.total_blocks]
    return fitting or views
