"""Blocks for sequences: taken from the pool, from a sequence that is preempted, or by copying one that is shared.

What has to be moved before a step computes is collected here for its plan. A block whose content is still to be read
by such a move stays HELD until the step is applied: nobody else, least of all a writer on another machine, may have it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from engine.block_pool import BlockPool
from engine.events import Preempted
from engine.prefixes import Prefixes
from engine.queues import Queues
from engine.sequence import SequenceState, Swapped
from engine.swap_space import PreemptCosts, SwapSpace
from kvrelay.blocks import blocks_for

MANY = 16
"""References of a block that a shortage does not look at, unless nothing could run otherwise."""


class Room:
    def __init__(self, pool: BlockPool, block_size: int, queues: Queues, prefixes: Prefixes, swap: SwapSpace) -> None:
        self.costs = PreemptCosts()
        self.kept = 0
        """Blocks that sequences which have not run yet must leave: a ticket has waited for them long enough."""
        self._events: list[Preempted] = []
        self._num_lost = 0
        self.num_copied = 0
        """Blocks copied because several sequences shared them, since the start."""
        self.copies: list[tuple[int, int]] = []
        self.swap_out: list[tuple[int, int]] = []
        self.swap_in: list[tuple[int, int]] = []
        self._pool = pool
        self._block_size = block_size
        self._queues = queues
        self._prefixes = prefixes
        self._swap = swap
        self._sources: Counter[int] = Counter()  # blocks to copy from, each with that many references of ours
        self._emptied: list[int] = []  # swapped out by the plan being made: free for its own sequences
        self._leaving: Counter[int] = Counter()  # the same, but others refer to them too: our references go at apply
        self._read: list[tuple[int, ...]] = []  # slots swapped in by the plan

    @property
    def free_slots(self) -> int:
        """Places in host memory that nothing lies in."""
        return self._swap.num_free

    def available(self) -> int:
        """Free blocks that are promised to nobody."""
        return self._pool.num_free - self._queues.promised

    def take_events(self) -> list[Preempted]:
        """Preemptions since the last call."""
        events, self._events = self._events, []
        return events

    def take_lost(self) -> int:
        """Tokens whose KV was given up since the last call."""
        lost, self._num_lost = self._num_lost, 0
        return lost

    def grow(self, seq: SequenceState, num_tokens: int, last_resort: bool) -> bool:
        """Take the blocks that num_tokens more tokens need, from sequences of lower rank if none are free."""
        missing_slots = seq.num_computed + num_tokens - seq.slots
        if missing_slots <= 0:
            return True
        new = self._take(seq, blocks_for(missing_slots, self._block_size), last_resort)
        if new is None:
            return False
        seq.block_ids += new
        seq.slots += len(new) * self._block_size
        return True

    def own_tail(self, seq: SequenceState, last_resort: bool) -> bool:
        """Before it writes to its last block: a copy of its own, if others refer to it or it is cached."""
        at = seq.num_computed // self._block_size
        if at < len(seq.block_ids):
            source = seq.block_ids[at]
            if not self._pool.is_writable(source, self._sources[source]):
                new = self._take(seq, 1, last_resort)
                if new is None:
                    seq.shared_tail = not self._preempt_sharers(seq, source, last_resort)
                    return not seq.shared_tail
                self.copies.append((source, new[0]))
                self._sources[source] += 1
                self.num_copied += 1
                seq.block_ids = (*seq.block_ids[:at], new[0], *seq.block_ids[at + 1 :])
        seq.shared_tail = False
        return True

    def bring_back(self, seq: SequenceState, num_held: int) -> None:
        """Swap its blocks in again, but for the first num_held, which it has. They must be available."""
        swapped, seq.swapped = seq.swapped, None
        assert swapped is not None
        slots = swapped.slots[num_held:]
        new = self._pool.allocate(len(slots))
        assert new is not None, f"{len(slots)} blocks are not available to swap in"
        self._queues.use_promise(seq, len(new))
        self.swap_in += zip(slots, new, strict=True)
        self._read.append(swapped.slots)
        seq.block_ids += new
        seq.slots = len(seq.block_ids) * self._block_size
        seq.num_computed = max(seq.num_computed, swapped.num_tokens)

    def preempt_for(self, seq: SequenceState, shortage: int, last_resort: bool) -> bool:
        """Free `shortage` blocks by preempting no more sequences than needed; nobody if that cannot be reached.

        A block becomes free with the last sequence that refers to it; one that others than sequences refer to as well
        (a push under way) would not, and does not count.
        """
        references = Counter(self._leaving)
        chosen: list[SequenceState] = []
        freed: set[int] = set()
        for victim in self._queues.victims(seq, last_resort):
            chosen.append(victim)
            shortage -= victim.promised
            for block_id in victim.block_ids if last_resort else self._own_blocks(victim):
                references[block_id] += 1
                if references[block_id] == self._pool.references(block_id):
                    freed.add(block_id)
                    shortage -= 1
            if shortage <= 0:
                self._preempt_all([v for v in chosen if v.promised or not freed.isdisjoint(v.block_ids)], last_resort)
                return True
        return False

    def preempt_all_running(self) -> None:
        """Nothing can run without what is held by some that wait and are of a higher class: they run instead."""
        self._preempt_all(self._queues.running[::-1], last_resort=True)

    def _own_blocks(self, seq: SequenceState) -> Iterator[int]:
        """From the last one on, up to those that so many others refer to that preempting will hardly free them: a
        prefix that is shared is long, and need not be walked at every shortage."""
        for block_id in reversed(seq.block_ids):
            if self._pool.references(block_id) > MANY:
                return
            yield block_id

    def _preempt_sharers(self, seq: SequenceState, block_id: int, last_resort: bool) -> bool:
        """Preempt all others that refer to this block of `seq`; nobody if one of them may not be."""
        sharers = [v for v in self._queues.victims(seq, last_resort) if block_id in v.block_ids]
        if self._pool.references(block_id) - self._sources[block_id] != 1 + len(sharers):
            return False
        self._preempt_all(sharers, last_resort=True)  # nothing of theirs is wanted now, so nothing is gained by a swap
        return self._pool.is_writable(block_id, self._sources[block_id])

    def _preempt_all(self, victims: list[SequenceState], last_resort: bool) -> None:
        for victim in victims:
            self._preempt(victim, may_swap=not last_resort)
        for block_id, ours in list(self._leaving.items()):
            if self._pool.references(block_id) == ours:
                self._pool.release([block_id] * (ours - 1))
                self._emptied.append(block_id)
                del self._leaving[block_id]

    def release(self, seq: SequenceState) -> None:
        """It needs its blocks, and the slots it was swapped to, no more."""
        self._prefixes.refresh(seq)
        self._pool.release(seq.block_ids)
        seq.block_ids = ()
        seq.slots = 0
        if seq.swapped is not None:
            self._swap.give_back(seq.swapped.slots)
            seq.swapped = None

    def settle(self) -> None:
        """The plan has run: what it read from may be used again."""
        self._pool.release(self._sources.elements())
        self._pool.release(self._leaving.elements())
        self._pool.release(self._emptied)
        for slots in self._read:
            self._swap.give_back(slots)
        self._sources.clear()
        self._leaving.clear()
        self._emptied, self._read = [], []
        self.copies, self.swap_out, self.swap_in = [], [], []

    def _take(self, seq: SequenceState, n: int, last_resort: bool) -> tuple[int, ...] | None:
        """n blocks of its own, its promise first."""
        available = self.available() + seq.promised
        short = n - available - len(self._emptied)
        if short > 0 and not self.preempt_for(seq, short, last_resort):
            return None
        from_pool = min(n, self.available() + seq.promised)
        new = self._pool.allocate(from_pool)
        assert new is not None, f"{from_pool} blocks are not free after preemption"
        emptied = tuple([self._emptied.pop() for _ in range(n - from_pool)])
        self._pool.disown(emptied)
        self._queues.use_promise(seq, n)
        return new + emptied

    def _preempt(self, seq: SequenceState, may_swap: bool) -> None:
        """Take its blocks and put it to the front of the queue, unless it has a place there; known tokens stay."""
        self._queues.send_back(seq)
        num_computed = seq.num_computed
        swapped = may_swap and self._swap_out(seq)
        if not swapped:
            self.release(seq)
        seq.num_computed = 0
        seq.num_published, seq.parent = 0, None
        seq.shared_tail = False
        seq.prompt_end = len(seq.known)
        seq.preemptions += 1
        self._events.append(Preempted(seq.spec.key, num_computed, swapped))
        self._num_lost += num_computed

    def _swap_out(self, seq: SequenceState) -> bool:
        """False, and nothing done, if there is no space or computing again is cheaper."""
        num_blocks = blocks_for(seq.num_computed, self._block_size)
        if not num_blocks or not self.costs.prefers_swap(num_blocks, seq.num_computed):
            return False
        slots = self._swap.take(num_blocks)
        if slots is None:
            return False
        self._prefixes.refresh(seq)
        self.swap_out += zip(seq.block_ids, slots, strict=False)
        self._leaving.update(seq.block_ids)
        seq.swapped = Swapped(slots, seq.num_computed)
        seq.block_ids = ()
        seq.slots = 0
        return True
