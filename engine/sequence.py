"""A sequence as the scheduler keeps it: known tokens, how many of them are computed, and where their KV lies."""

from __future__ import annotations

from kvrelay.requests import SequenceSpec


class SequenceState:
    """Mutable, touched by the scheduler alone. It owns one reference to each of `block_ids`.

    block_ids is replaced, never changed, when it grows: plans carry the very same tuple from step to step.
    """

    __slots__ = (
        "aborted",
        "arrival",
        "block_ids",
        "known",
        "num_computed",
        "planned",
        "preemptions",
        "promised",
        "prompt_end",
        "running",
        "slots",
        "spec",
        "times_passed",
    )

    def __init__(self, spec: SequenceSpec, arrival: int, block_ids: tuple[int, ...], num_computed: int, slots: int):
        self.spec = spec
        self.arrival = arrival
        """Counts up with every sequence added: a smaller one is older and goes first."""
        self.known = list(spec.token_ids)
        self.num_computed = num_computed
        self.block_ids = block_ids
        self.slots = slots
        """Token slots of block_ids."""
        self.prompt_end = len(self.known) if self.num_uncomputed > 1 or not num_computed else 0
        """Slices that start below it compute a prompt; 0 for a sequence handed over with all but its last token."""
        self.promised = 0
        """Blocks granted at admission and not taken yet."""
        self.preemptions = 0
        self.times_passed = 0
        self.running = False
        self.planned = False
        """A plan in flight reads and writes its blocks."""
        self.aborted = False

    @property
    def num_uncomputed(self) -> int:
        return len(self.known) - self.num_computed

    @property
    def index(self) -> int:
        """Output index of the next token sampled."""
        return len(self.known) - self.spec.num_prompt_tokens

    @property
    def max_slots(self) -> int:
        """Token slots it can ever use: the last token sampled is never computed."""
        return self.spec.num_prompt_tokens + self.spec.stop.max_tokens - 1
