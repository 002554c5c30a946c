"""The two values that cross between scheduler and executor: what a step computes, and what came of it.

Frozen, printable, comparable, replayable. No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.blocks import BlockTable
from kvrelay.requests import Sampling, SequenceKey


@dataclass(frozen=True, slots=True)
class SequenceSlice:
    """One sequence's rows in a step: `token_ids` at positions start .. start + len - 1.

    table covers every token up to the last row, so attention of the last row reads start + len slots.
    If `samples`, the last row yields the token of output index `index`.
    """

    key: SequenceKey
    token_ids: tuple[int, ...]
    start: int
    table: BlockTable
    samples: bool
    index: int
    sampling: Sampling

    @property
    def context_len(self) -> int:
        """Tokens visible to the last row."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Plan:
    """One step. Decoding sequences come first, then chunks of prompts."""

    step_id: int
    slices: tuple[SequenceSlice, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(s.token_ids) for s in self.slices)

    @property
    def num_samples(self) -> int:
        return sum(s.samples for s in self.slices)


@dataclass(frozen=True, slots=True)
class Result:
    """Sampled tokens, one per slice with `samples`, in the order of the plan."""

    step_id: int
    token_ids: tuple[int, ...]
