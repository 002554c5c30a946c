"""Owns the state of every KV block of one pool. Knows ids, counts and keys of contents; neither memory nor sequences.

    FREE --allocate--> HELD --release to 0--> FREE, or CACHED if its content has a key
    CACHED --hold--> HELD
    CACHED --allocate, reserve--> evicted, and as FREE
    FREE --reserve--> RESERVED --hold_reserved--> HELD
                      RESERVED --quarantine--> QUARANTINED
                      RESERVED | QUARANTINED --free_reserved--> FREE

A block has a key from `publish` until its content is about to change; HELD and CACHED blocks may have one. Eviction
takes the least recently used first, and of one sequence's blocks the deepest first: what is left is a prefix.
All calls come from the engine thread, between steps; a transition not drawn above is our own bug: AssertionError.
"""

from __future__ import annotations

import enum
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

from engine.prefix_cache import Entry, PrefixCache
from kvrelay.blocks import BlockCounts, BlockKey


class BlockState(enum.IntEnum):
    """What a block is used for."""

    FREE = 0
    HELD = 1
    """Referred to by sequences or by writes still being pushed from it; has a reference count."""
    CACHED = 2
    """Content kept, no reference."""
    RESERVED = 3
    """Promised to a ticket; a writer on another machine may write to it."""
    QUARANTINED = 4
    """Its ticket ended and a late write may still land in it."""


class BlockPool:
    """States and reference counts of blocks 0 .. num_blocks-1, O(1) a block.

    Order of ids, which tests rely on: a fresh pool gives 0, 1, 2, ...; freed blocks queue up behind, first freed first
    reused, in the order of the call that freed them. So a block rests as long as possible before its next owner.
    cache: whether contents are kept; without it publish does nothing.
    """

    def __init__(self, num_blocks: int, *, cache: bool = False) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        self.num_blocks = num_blocks
        self.cache = PrefixCache() if cache else None
        self._free: deque[int] = deque(range(num_blocks))
        self._unused: OrderedDict[int, None] = OrderedDict()  # CACHED blocks, the next to be evicted first
        self._states = [BlockState.FREE] * num_blocks
        self._references = [0] * num_blocks
        self._epochs = [0] * num_blocks
        self._counts = [0] * len(BlockState)
        self._counts[BlockState.FREE] = num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that allocate or reserve could take now: FREE and CACHED ones."""
        return len(self._free) + len(self._unused)

    def counts(self) -> BlockCounts:
        """Blocks by state."""
        free, held, cached, reserved, quarantined = self._counts
        return BlockCounts(self.num_blocks, free, held, cached, reserved, quarantined)

    def state(self, block_id: int) -> BlockState:
        return self._states[block_id]

    def references(self, block_id: int) -> int:
        """Reference count; 0 unless HELD."""
        return self._references[block_id]

    def epoch(self, block_id: int) -> int:
        """Epoch of the ticket that last reserved the block; 0 if none ever did."""
        return self._epochs[block_id]

    def is_writable(self, block_id: int, others: int = 0) -> bool:
        """Whether its one owner may change a HELD block: nobody else refers to it, but `others` who only copy from it
        before, and its content has no key."""
        return self._references[block_id] == 1 + others and (self.cache is None or block_id not in self.cache)

    def num_cached(self, entries: Iterable[Entry]) -> int:
        """How many of these entries' blocks are CACHED, so that holding them makes num_free smaller."""
        states = self._states
        return sum(e.block_id is not None and states[e.block_id] is BlockState.CACHED for e in entries)

    def num_sole(self, block_ids: Iterable[int]) -> int:
        """How many of these blocks would become free if the caller, who owns one reference each, released them."""
        references = self._references
        return sum(references[block_id] == 1 for block_id in block_ids)

    def allocate(self, n: int) -> tuple[int, ...] | None:
        """Take n blocks; the caller owns one reference to each. None, and nothing taken, if num_free is less."""
        taken = self._take(n, BlockState.HELD)
        for block_id in taken or ():
            self._references[block_id] = 1
        return taken

    def retain(self, block_ids: Iterable[int]) -> None:
        """One more reference to each HELD block, owned by the caller."""
        for block_id in block_ids:
            self._require(block_id, BlockState.HELD, to="HELD again")
            self._references[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """The caller gives back one reference to each, in the order of a table; at the last one the block is free, or
        cached if its content has a key."""
        kept: list[int] = []
        for block_id in block_ids:
            self._require(block_id, BlockState.HELD, to="FREE")
            self._references[block_id] -= 1
            if self._references[block_id]:
                continue
            if self.cache is not None and block_id in self.cache:
                self._move(block_id, BlockState.CACHED)
                kept.append(block_id)
            else:
                self._move(block_id, BlockState.FREE)
                self._free.append(block_id)
        for block_id in reversed(kept):
            self._unused[block_id] = None

    def hold(self, entries: Iterable[Entry]) -> tuple[int, ...]:
        """One more reference to the block of each entry, HELD or CACHED, owned by the caller. Returns the ids."""
        held = []
        for entry in entries:
            block_id = entry.block_id
            assert block_id is not None, "an entry that is gone has no block"
            if self._states[block_id] is BlockState.CACHED:
                del self._unused[block_id]
                self._move(block_id, BlockState.HELD)
            self._references[block_id] += 1
            held.append(block_id)
        return tuple(held)

    def publish(self, block_id: int, key: BlockKey, token_ids: Sequence[int], parent: Entry | None) -> Entry | None:
        """Give the content of a full HELD block its key. Returns the entry of this content."""
        if self.cache is None:
            return None
        self._require(block_id, BlockState.HELD, to="known by a key")
        entry, lost = self.cache.publish(block_id, key, token_ids, parent)
        if lost is not None and self._states[lost] is BlockState.CACHED:
            del self._unused[lost]
            self._move(lost, BlockState.FREE)
            self._free.append(lost)
        return entry

    def disown(self, block_ids: Iterable[int]) -> None:
        """The contents of these HELD blocks, each with one reference, are about to change: they lose their keys."""
        for block_id in block_ids:
            self._require(block_id, BlockState.HELD, to="written anew")
            assert self._references[block_id] == 1, f"block {block_id} has {self._references[block_id]} references"
            if self.cache is not None:
                self.cache.drop(block_id)

    def clear_cache(self) -> None:
        """Nothing is known by a key any more; CACHED blocks are free."""
        if self.cache is not None:
            self.cache.clear()
            for block_id in self._unused:
                self._move(block_id, BlockState.FREE)
            self._free.extend(self._unused)
            self._unused.clear()

    def reserve(self, n: int, epoch: int) -> tuple[int, ...] | None:
        """Promise n blocks to the ticket `epoch`, which owns them. None, and nothing taken, if num_free is less."""
        taken = self._take(n, BlockState.RESERVED)
        for block_id in taken or ():
            self._epochs[block_id] = epoch
        return taken

    def hold_reserved(self, block_ids: Iterable[int], epoch: int) -> None:
        """The ticket's blocks have landed: they pass from the ticket to the caller, who owns one reference to each."""
        for block_id in block_ids:
            self._require(block_id, BlockState.RESERVED, to="HELD", epoch=epoch)
            self._move(block_id, BlockState.HELD)
            self._references[block_id] = 1

    def quarantine(self, block_ids: Iterable[int], epoch: int) -> None:
        """The ticket ended while its writer may still write: the blocks stay the ticket's and nobody may use them."""
        for block_id in block_ids:
            self._require(block_id, BlockState.RESERVED, to="QUARANTINED", epoch=epoch)
            self._move(block_id, BlockState.QUARANTINED)

    def free_reserved(self, block_ids: Iterable[int], epoch: int) -> None:
        """No write of this ticket can land any more: its RESERVED or QUARANTINED blocks are free, nobody owns them."""
        for block_id in block_ids:
            self._require(block_id, BlockState.RESERVED, BlockState.QUARANTINED, to="FREE", epoch=epoch)
            self._move(block_id, BlockState.FREE)
            self._free.append(block_id)

    def check_integrity(self) -> None:
        """AssertionError unless states, counts, references and the free queue say the same. O(num_blocks)."""
        by_state = [self._states.count(state) for state in BlockState]
        assert by_state == self._counts, f"states {by_state} are counted as {self._counts}"
        assert sum(by_state) == self.num_blocks, f"{sum(by_state)} states for {self.num_blocks} blocks"
        queued = set(self._free)
        assert len(queued) == len(self._free), "a block is queued as free twice"
        for block_id, state in enumerate(self._states):
            references = self._references[block_id]
            assert (state is BlockState.FREE) == (block_id in queued), (
                f"block {block_id} is {state.name}, queue differs"
            )
            assert (state is BlockState.HELD) == (references > 0), (
                f"block {block_id} {state.name} has {references} refs"
            )
            assert (state is BlockState.CACHED) == (block_id in self._unused), f"block {block_id} is {state.name}"
        self._check_keys()

    def _check_keys(self) -> None:
        if self.cache is None:
            assert not self._unused, "blocks are cached in a pool without a cache"
            return
        self.cache.check_integrity()
        for block_id, state in enumerate(self._states):
            if state is not BlockState.HELD:
                assert (block_id in self.cache) == (state is BlockState.CACHED), (
                    f"block {block_id}: key and {state.name}"
                )

    def _take(self, n: int, state: BlockState) -> tuple[int, ...] | None:
        assert n >= 0, f"cannot take {n} blocks"
        if n > self.num_free:
            return None
        while len(self._free) < n:
            self._evict()
        taken = tuple([self._free.popleft() for _ in range(n)])
        for block_id in taken:
            self._states[block_id] = state
        self._counts[BlockState.FREE] -= n
        self._counts[state] += n
        return taken

    def _evict(self) -> None:
        assert self.cache is not None
        block_id, _ = self._unused.popitem(last=False)
        self.cache.drop(block_id)
        self._move(block_id, BlockState.FREE)
        self._free.append(block_id)

    def _move(self, block_id: int, state: BlockState) -> None:
        self._counts[self._states[block_id]] -= 1
        self._counts[state] += 1
        self._states[block_id] = state

    def _require(self, block_id: int, *allowed: BlockState, to: str, epoch: int | None = None) -> None:
        assert 0 <= block_id < self.num_blocks, f"block {block_id} is not in a pool of {self.num_blocks}"
        state = self._states[block_id]
        if state not in allowed:
            names = " or ".join(s.name for s in allowed)
            raise AssertionError(f"block {block_id} is {state.name}, must be {names} to become {to}")
        owner = self._epochs[block_id]
        assert epoch is None or epoch == owner, f"block {block_id} is {state.name} under epoch {owner}, not {epoch}"
