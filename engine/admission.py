"""Whether a waiting sequence may run now: the blocks it lacks, and those of its prefix that are cached. No budgets."""

from __future__ import annotations

from engine.block_pool import BlockPool
from engine.events import Matched
from engine.prefixes import Prefixes
from engine.queues import Queues
from engine.room import Room
from engine.sequence import SequenceState
from kvrelay.blocks import blocks_for

CAUTIOUS_AFTER = 2
"""Preemptions after which a sequence is admitted only when blocks for all it can ever use are promised to it."""


class Admission:
    def __init__(self, pool: BlockPool, block_size: int, queues: Queues, prefixes: Prefixes, room: Room) -> None:
        self._pool = pool
        self._block_size = block_size
        self._queues = queues
        self._prefixes = prefixes
        self._room = room
        self._events: list[Matched] = []
        self._num_found = 0
        self.num_matched_blocks = 0
        """Found in the cache for sequences admitted so far; what a step may find is bounded by the scheduler."""

    def take_events(self) -> list[Matched]:
        """Of admissions since the last call."""
        events, self._events = self._events, []
        return events

    def take_found(self) -> int:
        """Tokens that need no computing after all, of admissions since the last call."""
        found, self._num_found = self._num_found, 0
        return found

    def missing(self, seq: SequenceState) -> int:
        """Blocks it lacks for its known tokens and one more, if it may come to compute one more."""
        slots = seq.max_slots if seq.preemptions >= CAUTIOUS_AFTER else min(len(seq.known) + 1, seq.max_slots)
        return max(0, blocks_for(slots, self._block_size) - len(seq.block_ids))

    def run_if_fits(self, seq: SequenceState, try_hard: bool) -> bool:
        """Admit it if what it lacks is available, with what is cached of it computed already.

        One whose every token is cached computes the last one again, in a copy of its last block, or if there is no room
        for that, the whole last block.
        """
        missing, available = self.missing(seq), self._room.available()
        if not seq.preemptions:
            available -= self._room.kept
        cache = self._pool.cache
        seen = (cache.version if cache is not None else 0, available)
        if missing > available and (not try_hard or seq.did_not_fit == seen):
            return False
        seq.did_not_fit = seen
        found = [] if seq.block_ids else self._prefixes.match(seq)
        whole = len(found) * self._block_size >= len(seq.known)
        if whole and missing - len(found) + 1 + self._pool.num_cached(found) > available:
            found.pop()
            whole = False
        missing += whole - len(found)
        if missing + self._pool.num_cached(found) > available:
            return False
        self._queues.run(seq, promised=missing)
        before = seq.num_computed
        if found:
            seq.block_ids = self._pool.hold(found)
            seq.slots = len(found) * self._block_size
            seq.num_computed = min(seq.slots, len(seq.known) - 1)
            seq.num_published, seq.parent = len(found) - whole, found[-1].parent if whole else found[-1]
            seq.shared_tail = whole
        if seq.swapped is not None:
            self._room.bring_back(seq, len(found))
        if seq.num_computed > before:
            self._num_found += seq.num_computed - before
            self.num_matched_blocks += len(found)
            self._events.append(Matched(seq.spec.key, seq.num_computed))
        return True
