"""What a step changed, as values: the scheduler emits them, services turn them into reports. Knows no wire."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.blocks import BlockTable
from kvrelay.requests import FinishReason, Logprobs, SequenceKey


@dataclass(frozen=True, slots=True)
class Computed:
    """A chunk of a prompt is done: the KV of tokens 0 .. num_computed-1 stands in `table`, which covers just those.

    The scheduler owns the blocks and may let go of them in the next schedule. Who reads them longer (a push) retains
    them while handling the event.
    """

    key: SequenceKey
    num_computed: int
    table: BlockTable


@dataclass(frozen=True, slots=True)
class Sampled:
    """The token of output index `index`. Each index of a sequence comes once, in order, also over preemptions."""

    key: SequenceKey
    index: int
    token_id: int
    logprobs: Logprobs | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """The last event of a sequence whose next token could not be drawn: its grammar allows none that is known."""

    key: SequenceKey
    message: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of a sequence that ended by itself. num_tokens counts output tokens from index 0."""

    key: SequenceKey
    reason: FinishReason
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Preempted:
    """The sequence lost its blocks; nothing a client sees changes.

    num_tokens: computed so far, to be computed again unless swapped, which keeps them in host memory.
    """

    key: SequenceKey
    num_tokens: int = 0
    swapped: bool = False


@dataclass(frozen=True, slots=True)
class Matched:
    """Admitted with so many tokens computed already: cached, or swapped in again. Comes with the apply of that step."""

    key: SequenceKey
    num_tokens: int


Event = Computed | Sampled | Finished | Failed | Preempted | Matched
