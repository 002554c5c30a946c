"""What a client gets back, free of protos. Knows neither channels nor how a stream is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

from kvrelay.requests import Logprobs


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One token. text may be empty: it is what became certain with this token, and the pieces join to the answer.

    offset_s: since the server received the request, its clock; received_s: since the call began, this client's clock.
    sequence: which of the n sequences it belongs to; each has indexes of its own. logprobs: None unless asked for.
    """

    index: int
    token_id: int
    text: str
    offset_s: float
    received_s: float
    sequence: int = 0
    logprobs: Logprobs | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """cached_tokens: prompt tokens whose KV was found in a cache and not computed."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class HandOff:
    """What moving the KV blocks from prefill to decode cost. exposed_s: landed minus token 0.

    num_cached_blocks: blocks that decode had cached, which were not moved.
    """

    transport: str
    num_blocks: int
    num_bytes: int
    seconds: float
    exposed_s: float
    num_cached_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Choice:
    """One sequence that ended well. tail: the end of text, which came with the finish and not with a token.

    ttft_ms and gaps_ms (one per token but the first) are what this client saw; finish_reason: stop or length.
    migrations: how often it was moved because a worker was lost; the workers are the last placement's.
    logprobs: one per token, or none at all.
    """

    sequence: int
    token_ids: tuple[int, ...]
    text: str
    tail: str
    finish_reason: str
    usage: Usage
    ttft_ms: float | None
    gaps_ms: tuple[float, ...]
    prefill_worker: str
    decode_worker: str
    hand_off: HandOff | None
    migrations: int = 0
    logprobs: tuple[Logprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class GenerateResult:
    """A stream that ended well. choices: one per sequence, in their order; what a choice has too is the first one's.

    prompt_text: with echo, else empty.
    """

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    tail: str
    finish_reason: str
    usage: Usage
    seed: int
    model: str
    ttft_ms: float | None
    gaps_ms: tuple[float, ...]
    prefill_worker: str
    decode_worker: str
    hand_off: HandOff | None
    migrations: int = 0
    choices: tuple[Choice, ...] = ()
    logprobs: tuple[Logprobs, ...] = ()
    prompt_text: str = ""

    @classmethod
    def of(
        cls, request_id: str, seed: int, model: str, choices: Sequence[Choice], prompt_text: str = ""
    ) -> GenerateResult:
        """choices: at least one, by sequence."""
        first = choices[0]
        return cls(
            request_id=request_id,
            token_ids=first.token_ids,
            text=first.text,
            tail=first.tail,
            finish_reason=first.finish_reason,
            usage=first.usage,
            seed=seed,
            model=model,
            ttft_ms=first.ttft_ms,
            gaps_ms=first.gaps_ms,
            prefill_worker=first.prefill_worker,
            decode_worker=first.decode_worker,
            hand_off=first.hand_off,
            migrations=first.migrations,
            choices=tuple(choices),
            logprobs=first.logprobs,
            prompt_text=prompt_text,
        )


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A served model and the limits its requests are checked against. A prompt has 1 .. context_limit - 1 tokens."""

    model_id: str
    fingerprint: str
    vocab_size: int
    context_limit: int
    eos_token_ids: tuple[int, ...]
    block_size: int
    chat_template: bool
    max_stop_strings: int
    max_stop_string_bytes: int
    max_n: int
    max_request_bytes: int
    smallest_cacheable_prefix: int = 0
    """A prompt of so many tokens, sent again, has a cached part; 0: nothing is cached."""
    max_logit_bias: int = 0
    max_logprobs: int = 0
    max_grammar_bytes: int = 0
    """Of the text of a constraint."""
    max_text_bytes: int = 0
    max_token_ids: int = 0
    """Of one tokenize and one detokenize."""


class Blocks(TypedDict):
    total: int
    free: int
    held: int
    cached: int
    reserved: int
    quarantined: int


class WorkerStatus(TypedDict):
    """One worker as the coordinator sees it. silent_s: since it was last heard; counters: see docs/hand-off.md.

    unwell: its engine does not come round, or moves nothing although there is work; it gets nothing new.
    """

    id: str
    role: str
    incarnation: str
    pid: int
    address: str
    transport: str
    executor: str
    blocks: Blocks
    running: int
    waiting: int
    queued_tokens: int
    transfers_in_flight: int
    tokens_per_s: float
    draining: bool
    unwell: bool
    silent_s: float
    counters: dict[str, int]


class Topology(TypedDict):
    """counters: what became of requests since the coordinator began (migrated, requeued, outcome.stop, ...)."""

    coordinator_id: str
    queued_requests: int
    open_requests: int
    workers: list[WorkerStatus]
    counters: dict[str, int]
