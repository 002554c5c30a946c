"""Owns the state of every KV block of one pool. Knows ids and counts; neither memory, contents nor sequences.

    FREE --allocate--> HELD --release to 0--> FREE
    FREE --reserve--> RESERVED --hold_reserved--> HELD
                      RESERVED --quarantine--> QUARANTINED
                      RESERVED | QUARANTINED --free_reserved--> FREE

CACHED (nobody refers to it, content kept) is counted here and entered by no transition until prefixes are cached.
All calls come from the engine thread, between steps; a transition not drawn above is our own bug: AssertionError.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable

from kvrelay.blocks import BlockCounts


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
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        self.num_blocks = num_blocks
        self._free: deque[int] = deque(range(num_blocks))
        self._states = [BlockState.FREE] * num_blocks
        self._references = [0] * num_blocks
        self._epochs = [0] * num_blocks
        self._counts = [0] * len(BlockState)
        self._counts[BlockState.FREE] = num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that allocate or reserve could take now."""
        return len(self._free)

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

    def num_sole(self, block_ids: Iterable[int]) -> int:
        """How many of these blocks would become free if the caller, who owns one reference each, released them."""
        references = self._references
        return sum(references[block_id] == 1 for block_id in block_ids)

    def allocate(self, n: int) -> tuple[int, ...] | None:
        """Take n free blocks; the caller owns one reference to each. None, and nothing taken, if fewer are free."""
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
        """The caller gives back one reference to each; at the last one the block is free."""
        for block_id in block_ids:
            self._require(block_id, BlockState.HELD, to="FREE")
            self._references[block_id] -= 1
            if not self._references[block_id]:
                self._move(block_id, BlockState.FREE)
                self._free.append(block_id)

    def reserve(self, n: int, epoch: int) -> tuple[int, ...] | None:
        """Promise n free blocks to the ticket `epoch`, which owns them. None, and nothing taken, if fewer are free."""
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

    def _take(self, n: int, state: BlockState) -> tuple[int, ...] | None:
        assert n >= 0, f"cannot take {n} blocks"
        if n > len(self._free):
            return None
        taken = tuple([self._free.popleft() for _ in range(n)])
        for block_id in taken:
            self._states[block_id] = state
        self._counts[BlockState.FREE] -= n
        self._counts[state] += n
        return taken

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
