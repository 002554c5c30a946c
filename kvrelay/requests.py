"""What a request asks of an engine. Knows neither wires, clocks nor tensors."""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass, replace
from typing import NamedTuple, NewType

RequestId = NewType("RequestId", str)
"""Drawn by the coordinator, unique; a client's own id is only a label."""
SessionId = NewType("SessionId", str)
"""One stream between one coordinator and one worker; fresh at every dial."""
WorkerId = NewType("WorkerId", str)
Incarnation = NewType("Incarnation", str)
"""One life of a worker process: random at every start."""


class Role(enum.StrEnum):
    """Which half of inference a worker does."""

    PREFILL = "prefill"
    DECODE = "decode"


class Priority(enum.IntEnum):
    """Who goes first where not all can: the higher class is placed and admitted first, and preempted last."""

    BATCH = 0
    NORMAL = 1
    INTERACTIVE = 2


class FinishReason(enum.StrEnum):
    """Why a stream ended well."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class SequenceKey:
    """Names one stream of tokens inside an engine. Together with an index it names one token."""

    session: SessionId
    request_id: RequestId
    attempt: int
    sequence: int = 0


class Logprobs(NamedTuple):
    """Natural logarithms of probabilities as the model gave them, before penalties, biases, temperature and filters.

    token: of the token that was drawn. top: (token id, logarithm) of the likeliest ones, likeliest first.
    """

    token: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to draw a token from logits. temperature 0 is greedy; top_k 0 and min_p 0 are off.

    repetition_penalty divides positive logits of tokens seen in prompt or output, and multiplies negative ones (1 is
    off; Keskar et al. 2019, CTRL). presence_penalty is taken once from the logits of tokens in the output,
    frequency_penalty once for each time. logit_bias: (token id, what is added to its logit). grammar: what the output
    must match, as llguidance reads it; empty: anything. logprobs: report those of each token, and of so many of the
    likeliest; None: none.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: str = ""
    logprobs: int | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalizes(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def looks_back(self) -> bool:
        """Whether a draw depends on the tokens before it."""
        return self.penalizes or bool(self.grammar)

    @property
    def plain(self) -> bool:
        """Whether a draw takes logits as they are, asks for nothing but the token, and has no filter beside top_k and
        top_p."""
        return not (self.logit_bias or self.grammar or self.min_p or self.logprobs is not None or self.penalizes)

    def of_sequence(self, sequence: int) -> Sampling:
        """How sequence 0, 1, ... of a request draws: the first as asked, each later one from a seed of its own."""
        if sequence == 0:
            return self
        raw = self.seed.to_bytes(8, "little") + sequence.to_bytes(4, "little")
        return replace(self, seed=int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little"))


NO_IDS: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class StopRule:
    """When an engine ends a sequence. Stop strings are the coordinator's business.

    max_tokens counts output tokens from index 0 of the request, over all attempts.
    stop_token_ids holds the model's EOS ids too, unless the client asked to ignore them. Before index
    min_tokens one of them is drawn only where a grammar allows nothing else, and ends the sequence there too.
    """

    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0

    def banned(self, index: int) -> frozenset[int]:
        """Tokens that must not be drawn at output index `index`."""
        return self.stop_token_ids if index < self.min_tokens else NO_IDS

    def finish_of(self, index: int, token_id: int) -> FinishReason | None:
        """Why the sequence ends with `token_id` at output index `index`, or None. Stop beats length at one index."""
        if token_id in self.stop_token_ids:  # also before min_tokens: it came because nothing else could
            return FinishReason.STOP
        return FinishReason.LENGTH if index + 1 >= self.max_tokens else None


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """One sequence as it is given to an engine.

    token_ids are all known tokens (prompt, then tokens an earlier attempt already streamed);
    the next token sampled has output index `first_index` = len(token_ids) - num_prompt_tokens.
    n: so many tokens are sampled there, for as many sequences that share what is known so far; key names the first.
    prefix_cache: whether it may use and fill the cache of full blocks.
    """

    key: SequenceKey
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling: Sampling
    stop: StopRule
    tenant: str = "default"
    cache_salt: str = ""
    n: int = 1
    prefix_cache: bool = True
    priority: Priority = Priority.NORMAL

    @property
    def first_index(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens
