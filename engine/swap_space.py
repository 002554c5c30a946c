"""Places in host memory for blocks that must make room, and whether to use them. Pure: knows no bytes and no clock."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PreemptCosts:
    """What either way of making room costs, as measured. mode: auto takes the cheaper one.

    swap_s: one block, one way. compute_s: one token computed again. 0 where nothing was measured yet.
    """

    mode: str = "auto"
    swap_s: float = 0.0
    compute_s: float = 0.0

    def prefers_swap(self, num_blocks: int, num_tokens: int) -> bool:
        """For a sequence with so many blocks, of which so many tokens would be computed again."""
        if self.mode != "auto":
            return self.mode == "swap"
        return 2 * num_blocks * self.swap_s < num_tokens * self.compute_s


class SwapSpace:
    """Slots 0 .. num_slots-1, each as large as a block. Owned by the scheduler; the executor has the memory."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._used = bytearray(num_slots)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, n: int) -> tuple[int, ...] | None:
        """n slots, or None and nothing taken."""
        if n > len(self._free):
            return None
        slots = tuple([self._free.pop() for _ in range(n)])
        for slot in slots:
            self._used[slot] = 1
        return slots

    def give_back(self, slots: tuple[int, ...]) -> None:
        for slot in slots:
            assert self._used[slot], f"slot {slot} is free already"
            self._used[slot] = 0
        self._free.extend(reversed(slots))
