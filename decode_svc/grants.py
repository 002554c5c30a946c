"""Which waiting reserve may have its blocks now? Pure: numbers in, a decision out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

MAX_PASSING_S = 2.0
"""How long smaller requests may pass a blocked head; then the queue waits for it."""


@dataclass(frozen=True, slots=True)
class PoolRoom:
    """spare: free blocks that no running sequence is about to need. promised: blocks that tickets hold now."""

    total: int
    spare: int
    promised: int

    def fits(self, need: int) -> bool:
        """need: blocks that would not be free any more. All tickets together hold half the pool, or one request."""
        return need <= self.spare and (self.promised == 0 or self.promised + need <= self.total // 2)


def next_grant(needs: Iterable[int], room: PoolRoom, head_blocked_s: float) -> int | None:
    """Index of the reserve to grant next, or None. FIFO; smaller ones may pass a blocked head for MAX_PASSING_S.

    needs: asked for one by one, as far as they are looked at.
    """
    for i, need in enumerate(needs):
        if room.fits(need):
            return i
        if head_blocked_s >= MAX_PASSING_S:
            return None
    return None
