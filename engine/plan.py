"""The two values that cross between scheduler and executor: what a step computes, and what came of it.

Frozen, printable, comparable, replayable. No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from engine.token_ids import TokenIds
from kvrelay.blocks import BlockTable
from kvrelay.requests import NO_IDS, Logprobs, Sampling, SequenceKey

NOTHING = TokenIds()


class Past(NamedTuple):
    """What a draw depends on beside logits and index: the output so far, what is in the prompt, and what is banned.

    output is empty where only `banned` matters. prompt has each of the prompt's ids once, as first found there, and is
    empty unless repetition of them is penalized.
    """

    output: TokenIds = NOTHING
    prompt: TokenIds = NOTHING
    banned: frozenset[int] = NO_IDS


class SequenceSlice(NamedTuple):
    """One sequence's rows in a step: `token_ids` at positions start .. start + len - 1.

    table covers every token up to the last row, so attention of the last row reads start + len slots.
    If `samples`, the last row yields the token of output index `index`, and one more token for each of `forks`: the
    samplings of sequences 1, 2, ... of the request, which go on from here on their own.
    past: None where the draw depends on nothing of it.
    """

    key: SequenceKey
    token_ids: tuple[int, ...]
    start: int
    table: BlockTable
    samples: bool
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs here
    sampling: Sampling
    forks: tuple[Sampling, ...] = ()
    past: Past | None = None

    @property
    def num_samples(self) -> int:
        return 1 + len(self.forks) if self.samples else 0

    @property
    def context_len(self) -> int:
        """Tokens visible to the last row."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Plan:
    """One step. Decoding sequences come first, then chunks of prompts.

    Blocks are moved before anything is computed, in this order: swap_out (block id, host slot), copies (source id,
    target id), swap_in (host slot, block id).
    """

    step_id: int
    slices: tuple[SequenceSlice, ...]
    copies: tuple[tuple[int, int], ...] = ()
    swap_out: tuple[tuple[int, int], ...] = ()
    swap_in: tuple[tuple[int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(s.token_ids) for s in self.slices)

    @property
    def num_samples(self) -> int:
        return sum(s.num_samples for s in self.slices)


class Phases(NamedTuple):
    """Seconds of a step's parts: making tensors, moves and forward pass, sampling."""

    build_s: float
    forward_s: float
    sample_s: float


@dataclass(frozen=True, slots=True)
class Result:
    """Sampled tokens, in the order of the plan: num_samples of each slice, sequence 0 first.

    phases: of an executor that measures them; they are no part of what was computed. logprobs: of each token, None
    where nobody asked; empty when nobody asked for any. failures: (position in token_ids, why) of draws that could not
    be made; the token there means nothing.
    """

    step_id: int
    token_ids: tuple[int, ...]
    phases: Phases | None = field(default=None, compare=False)
    logprobs: tuple[Logprobs | None, ...] = ()
    failures: tuple[tuple[int, str], ...] = ()

    def failure(self, position: int) -> str | None:
        """Why the draw at this position of token_ids could not be made, or None."""
        return dict(self.failures).get(position)
