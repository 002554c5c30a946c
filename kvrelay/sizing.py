"""What fits and what it costs, worked out on paper: pools, steps, prompts, chunks, hits. Knows no model, no machine.

Bytes are plain bytes, times seconds, shares 0 to 1, operations multiplications and additions. Decode steps are lower
bounds: bytes read at full bandwidth, nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.blocks import blocks_for


def pool_bytes(card_bytes: int, usable: float, weight_bytes: int, activation_bytes: int) -> int:
    """What is left for KV of a card of which this share may be used."""
    return max(0, int(card_bytes * usable) - weight_bytes - activation_bytes)


def pool_tokens(pool_bytes: int, token_bytes: int) -> int:
    """Token slots of a pool. token_bytes: of KV, over all layers."""
    return pool_bytes // token_bytes


@dataclass(frozen=True, slots=True)
class Fit:
    """How many requests a pool holds at a time, and the share of each one's slots that nothing stands in."""

    num_requests: int
    wasted: float


def preallocated(pool_bytes: int, token_bytes: int, max_tokens: int, mean_tokens: float) -> Fit:
    """Each request owns the longest stretch it might need, from its start on."""
    return Fit(pool_bytes // (max_tokens * token_bytes), 1 - mean_tokens / max_tokens)


def paged(pool_bytes: int, token_bytes: int, block_size: int, mean_tokens: float) -> Fit:
    """Each request owns blocks, of which on average the last one is half empty."""
    waste = mean_wasted_tokens(block_size)
    return Fit(int(pool_tokens(pool_bytes, token_bytes) / (mean_tokens + waste)), waste / mean_tokens)


def mean_wasted_tokens(block_size: int) -> float:
    """Slots of its last block that a request leaves empty, if every length is as likely as any other."""
    return (block_size - 1) / 2


@dataclass(frozen=True, slots=True)
class StepBound:
    """The least that one step costs which decodes one token for each of `num_sequences`."""

    num_sequences: int
    bytes_read: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.num_sequences / self.seconds


def decode_step(
    num_sequences: int, context_tokens: int, *, weight_bytes: int, token_bytes: int, bytes_per_s: float
) -> StepBound:
    """Weights are read once for all, KV once for each. context_tokens: of each sequence."""
    read = weight_bytes + num_sequences * context_tokens * token_bytes
    return StepBound(num_sequences, read, read / bytes_per_s)


@dataclass(frozen=True, slots=True)
class PromptCost:
    """Operations that computing the KV of some prompt tokens takes: in linear layers, and in attention."""

    linear: int
    attention: int

    @property
    def total(self) -> int:
        return self.linear + self.attention


def prompt_cost(num_tokens: int, past_tokens: int = 0, *, layer_params: int, num_layers: int, width: int) -> PromptCost:
    """num_tokens tokens that follow past_tokens, all looking back at what came before them.

    layer_params: weights of all layers' matrices. width: of attention, heads x head size. A token that sees n others
    costs 4 x width x n in each layer (scores, then their sum); over a stretch n grows by one a token, so its squares
    count. Logits are left out: a prompt needs those of its last token only.
    """
    end = past_tokens + num_tokens
    return PromptCost(2 * layer_params * num_tokens, 2 * width * num_layers * (end**2 - past_tokens**2))


@dataclass(frozen=True, slots=True)
class Chunk:
    """One step's share of a prompt: where it begins and how many tokens it computes."""

    past_tokens: int
    num_tokens: int


def chunks(prompt_tokens: int, step_tokens: int, decode_rows: int = 0) -> tuple[Chunk, ...]:
    """The prompt cut to a budget of step_tokens a step, of which decoding sequences take their rows first.

    ValueError if these leave nothing.
    """
    size = step_tokens - decode_rows
    if size < 1:
        raise ValueError(f"{decode_rows} decoding sequences leave nothing of a step of {step_tokens} tokens")
    return tuple(Chunk(past, min(size, prompt_tokens - past)) for past in range(0, prompt_tokens, size))


@dataclass(frozen=True, slots=True)
class Hit:
    """What a cached prefix saves a prompt of num_tokens."""

    num_blocks: int
    cached_tokens: int
    left_tokens: int

    @property
    def linear_work(self) -> float:
        """Share of the work in linear layers that is left: these cost the same for every token."""
        return self.left_tokens / (self.cached_tokens + self.left_tokens)


def prefix_hit(shared_tokens: int, num_tokens: int, block_size: int) -> Hit:
    """For a prompt of which the first shared_tokens are cached: full blocks hit, and one token is always computed."""
    num_blocks = min(shared_tokens, num_tokens) // block_size
    cached = min(num_blocks * block_size, num_tokens - 1)
    return Hit(num_blocks, cached, num_tokens - cached)


def handoff_bytes(num_tokens: int, block_size: int, token_bytes: int) -> int:
    """What a prompt moves from prefill to decode: whole blocks."""
    return blocks_for(num_tokens, block_size) * block_size * token_bytes
