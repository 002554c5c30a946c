"""Which worker caches which blocks, as their events tell: a bit per worker for each key. Knows no calls and no clocks.

Events are numbered: what was seen twice is taken once, and what was missed is noticed. It may be behind the truth at
any time; that costs the time of a worse placement and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvrelay.blocks import BlockEventKind, BlockEvents, BlockKey, BlockList, BlockRun
from kvrelay.requests import WorkerId

MAX_HELD_KEYS = 65_536
"""Keys of events kept while a list is awaited, 2 MiB of them a worker. Beyond, they go, and another list is wanted."""


@dataclass(slots=True)
class _Holder:
    """One worker. next: number of the event that follows what is known. held: later ones, from beyond a gap."""

    bit: int
    next: int = 1
    digests: set[bytes] = field(default_factory=set)
    held: list[BlockEvents] = field(default_factory=list)
    held_keys: int = 0


class PrefixIndex:
    """Holds an entry for what some worker is known to cache, and nothing else."""

    def __init__(self) -> None:
        self._bits: dict[bytes, int] = {}
        self._holders: dict[WorkerId, _Holder] = {}
        self._free_bits: list[int] = []

    def __len__(self) -> int:
        """Different keys that are cached anywhere."""
        return len(self._bits)

    def num_keys(self, worker: WorkerId) -> int:
        holder = self._holders.get(worker)
        return len(holder.digests) if holder is not None else 0

    def apply(self, worker: WorkerId, events: BlockEvents) -> bool:
        """False when events before these are missing: the worker's whole list is wanted. What is there stays meanwhile,
        and these count as soon as the list has come."""
        holder = self._holder(worker)
        if events.first > holder.next:
            self._hold(holder, events)
            return False
        self._take(holder, events)
        return not holder.held

    def replace(self, worker: WorkerId, blocks: BlockList) -> bool:
        """The worker's whole list, as of event `next` - 1. False: too old to close the gap; another is wanted."""
        holder = self._holder(worker)
        if blocks.next > holder.next:
            self._clear(holder)
            self._store(holder, blocks.keys)
            holder.next = blocks.next
        held, holder.held, holder.held_keys = holder.held, [], 0
        complete = [self.apply(worker, events) for events in held]
        return all(complete)

    def forget(self, worker: WorkerId) -> None:
        """Nothing is known of it any more; its events begin anew. Void if nothing was."""
        holder = self._holders.pop(worker, None)
        if holder is not None:
            self._clear(holder)
            self._free_bits.append(holder.bit)

    def depths(self, keys: Sequence[BlockKey]) -> dict[WorkerId, int]:
        """How many of these blocks each worker holds, counted from the first on without a hole; who holds none is left
        out."""
        if not keys:
            return {}
        bits, found = self._bits, dict[int, int]()
        holding = bits.get(keys[0].digest, 0)
        depth = 0
        for key in keys:
            still = holding & bits.get(key.digest, 0)
            if still != holding:
                _note(found, holding & ~still, depth)
                holding = still
            if not holding:
                break
            depth += 1
        _note(found, holding, depth)
        return {worker: found[h.bit] for worker, h in self._holders.items() if h.bit in found}

    def _holder(self, worker: WorkerId) -> _Holder:
        holder = self._holders.get(worker)
        if holder is None:
            bit = self._free_bits.pop() if self._free_bits else 1 << len(self._holders)
            holder = self._holders[worker] = _Holder(bit)
        return holder

    def _hold(self, holder: _Holder, events: BlockEvents) -> None:
        holder.held_keys += events.next - events.first
        if holder.held_keys > MAX_HELD_KEYS:
            holder.held, holder.held_keys = [], 0
        holder.held.append(events)

    def _take(self, holder: _Holder, events: BlockEvents) -> None:
        at = events.first
        for run in events.runs:
            seen = holder.next - at
            at += len(run)
            if at > holder.next:
                self._carry_out(holder, run, max(0, seen))
                holder.next = at

    def _carry_out(self, holder: _Holder, run: BlockRun, skip: int) -> None:
        if run.kind is BlockEventKind.STORED:
            self._store(holder, run.keys[skip:])
        elif run.kind is BlockEventKind.EVICTED:
            self._evict(holder, [key.digest for key in run.keys[skip:]])
        else:
            self._clear(holder)

    def _store(self, holder: _Holder, keys: Iterable[BlockKey]) -> None:
        bits, digests, bit = self._bits, holder.digests, holder.bit
        for key in keys:
            digest = key.digest
            bits[digest] = bits.get(digest, 0) | bit
            digests.add(digest)

    def _evict(self, holder: _Holder, digests: Iterable[bytes]) -> None:
        bits, held, bit = self._bits, holder.digests, holder.bit
        for digest in digests:
            if digest not in held:
                continue
            held.remove(digest)
            left = bits[digest] & ~bit
            if left:
                bits[digest] = left
            else:
                del bits[digest]

    def _clear(self, holder: _Holder) -> None:
        self._evict(holder, list(holder.digests))


def _note(found: dict[int, int], bits: int, depth: int) -> None:
    """Gives each of these bits the depth, unless that is 0."""
    while bits and depth:
        lowest = bits & -bits
        found[lowest] = depth
        bits ^= lowest
