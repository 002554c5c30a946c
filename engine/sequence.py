"""A sequence as the scheduler keeps it: known tokens, how many of them are computed, and where their KV lies.

Knows what its rows of a step are, not which step they go into.
"""

from __future__ import annotations

import sys
from array import array
from dataclasses import dataclass

from engine.plan import NOTHING, Past, SequenceSlice
from engine.prefix_cache import Entry
from engine.token_ids import CODE, TokenIds
from kvrelay.blocks import BlockKey, BlockTable, KeyChain
from kvrelay.requests import Priority, SequenceSpec

CLASS_RANK = 1 << 48
"""More than sequences ever arrive: a class of priority counts more than any age."""
CLASS_TURNS = 64
"""A sequence that waits is passed by so many later ones of the next class, at most: a class counts as much as they."""


def turn_of(arrival: int, priority: Priority) -> int:
    """The smaller one goes first of two that wait."""
    return arrival - int(priority) * CLASS_TURNS


@dataclass(frozen=True, slots=True)
class Swapped:
    """Where the blocks of a preempted sequence lie: slots[i] holds its block i; num_tokens of them are computed."""

    slots: tuple[int, ...]
    num_tokens: int


class SequenceState:
    """Mutable, touched by the scheduler alone. It owns one reference to each of `block_ids`.

    block_ids is replaced, never changed, when it grows: plans carry the very same tuple from step to step.
    """

    __slots__ = (
        "aborted",
        "block_ids",
        "chain",
        "did_not_fit",
        "keys",
        "known",
        "num_computed",
        "num_published",
        "output",
        "parent",
        "past_until",
        "planned",
        "preemptions",
        "promised",
        "prompt",
        "prompt_end",
        "rank",
        "running",
        "shared_tail",
        "slots",
        "spec",
        "swapped",
        "times_passed",
        "turn",
    )

    def __init__(self, spec: SequenceSpec, arrival: int, block_ids: tuple[int, ...], num_computed: int, slots: int):
        self.spec = spec
        self.rank = arrival - int(spec.priority) * CLASS_RANK
        """arrival counts up with every sequence added. The smaller rank moves on first and gives way last: the higher
        class, and in a class the older one."""
        self.turn = turn_of(arrival, spec.priority)
        """The smaller one is admitted first, and gets more of a step's tokens for its prompt."""
        self.known = list(spec.token_ids)
        self.output = array(CODE)
        self.prompt: TokenIds | None = None
        """Output and prompt as pasts have them, as far as they were needed so far."""
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
        self.chain: KeyChain | None = None
        """None: it neither uses nor fills the cache of prefixes."""
        self.did_not_fit: tuple[int, int] | None = None
        """Version of the cache, and blocks available, when it was last found too big: it is, until they change."""
        self.keys: list[BlockKey] = []
        """Of its first full blocks, as many as were needed so far."""
        self.parent: Entry | None = None
        """Entry of the last block it published or matched."""
        self.num_published = 0
        self.shared_tail = False
        """Its last block may belong to others too: to be copied before anything is written to it."""
        self.swapped: Swapped | None = None
        self.past_until = sys.maxsize if spec.sampling.looks_back else spec.stop.min_tokens
        """Draws of output indexes below it depend on what is known, or on what is banned."""

    @property
    def num_uncomputed(self) -> int:
        return len(self.known) - self.num_computed

    def goes_before(self, other: SequenceState) -> bool:
        """Whether it is of a higher class, and the other has not waited for too many others yet."""
        return self.spec.priority > other.spec.priority and self.turn < other.turn

    @property
    def index(self) -> int:
        """Output index of the next token sampled."""
        return len(self.known) - self.spec.num_prompt_tokens

    @property
    def max_slots(self) -> int:
        """Token slots it can ever use: the last token sampled is never computed."""
        return self.spec.num_prompt_tokens + self.spec.stop.max_tokens - 1

    def rows(self, num_tokens: int, block_size: int) -> SequenceSlice:
        """Of its first num_tokens uncomputed tokens, whose blocks it has. It samples if they are all of them."""
        start = self.num_computed
        end = start + num_tokens
        known = self.known
        spec = self.spec
        token_ids = (known[start],) if num_tokens == 1 else tuple(known[start:end])
        table = BlockTable(0, block_size, self.block_ids, end)
        index = len(known) - spec.num_prompt_tokens
        if end != len(known):
            return SequenceSlice(spec.key, token_ids, start, table, False, index, spec.sampling)
        forks = tuple([spec.sampling.of_sequence(i) for i in range(1, spec.n)]) if spec.n > 1 else ()
        past = self._past(index) if index < self.past_until else None
        return SequenceSlice(spec.key, token_ids, start, table, True, index, spec.sampling, forks, past)

    def _past(self, index: int) -> Past:
        """Only what its draws look at: a prompt may be long, and each token has a past of its own."""
        spec, known, output = self.spec, self.known, self.output
        banned = spec.stop.banned(index)
        if not spec.sampling.looks_back:
            return Past(banned=banned)
        output.extend(known[spec.num_prompt_tokens + len(output) :])
        if self.prompt is None:
            repeats = spec.sampling.repetition_penalty != 1.0
            self.prompt = TokenIds.of(dict.fromkeys(known[: spec.num_prompt_tokens])) if repeats else NOTHING
        return Past(TokenIds(output.tobytes()), self.prompt, banned)

    def fork(
        self, spec: SequenceSpec, arrival: int, block_ids: tuple[int, ...], slots: int, token_id: int
    ) -> SequenceState:
        """A sequence that knows and has computed the same, and goes on from here with a token of its own.

        block_ids: those of this one that hold something, each with a reference of its own.
        """
        other = SequenceState(spec, arrival, block_ids, self.num_computed, slots)
        other.known = [*self.known, token_id]
        other.prompt = self.prompt
        other.prompt_end = 0
        other.shared_tail = self.shared_tail = True
        if self.chain is not None:
            other.chain, other.keys = self.chain.copy(), list(self.keys)
            other.parent, other.num_published = self.parent, self.num_published
        return other
