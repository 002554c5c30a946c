"""A long prompt on a machine: cut into chunks, in one piece before others, moved to decode. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.blocks import blocks_for
from kvrelay.errors import InvalidArgument
from kvrelay.planning.cost import ModelCost, plan_step
from kvrelay.planning.given import Load, Machine, Terms
from kvrelay.sizing import PromptCost, chunks, handoff_bytes


@dataclass(frozen=True, slots=True)
class ChunkStep:
    """A step that computes a chunk. seconds: the chunk's operations alone; step_s: with the decode rows beside it."""

    past_tokens: int
    num_tokens: int
    linear: int
    attention: int
    seconds: float
    step_s: float


@dataclass(frozen=True, slots=True)
class LongPrompt:
    """One long prompt. stalled_steps: of decoding sequences in the same batch, if it ran in one piece.

    chunks: on a prefill worker, which has no decode rows. mixed: with them inside the same budget.
    """

    num_tokens: int
    cost: PromptCost
    seconds: float
    real_s: float
    decode_sequences: int
    stalled_steps: float
    real_stalled_steps: float
    chunks: tuple[ChunkStep, ...]
    mixed: tuple[ChunkStep, ...]
    handoff_blocks: int
    handoff_bytes: int
    handoff_s: float


def plan_long_prompt(cost: ModelCost, machine: Machine, load: Load, terms: Terms) -> LongPrompt:
    """InvalidArgument(decode_sequences) when these leave nothing of a step."""
    num_tokens = terms.long_prompt or cost.max_positions
    if terms.decode_sequences >= terms.step_tokens:
        raise InvalidArgument(
            f"--decode-sequences {terms.decode_sequences} leave nothing of --step-tokens {terms.step_tokens}",
            field="--decode-sequences",
        )
    work = cost.prompt(num_tokens)
    seconds = work.total / machine.flops_per_s
    step_s = plan_step(cost, machine, terms.decode_sequences, load.mean_tokens).seconds
    moved = handoff_bytes(num_tokens, terms.block_size, cost.token_bytes)

    def cut(decode_rows: int) -> tuple[ChunkStep, ...]:
        return plan_chunks(cost, machine, num_tokens, terms.step_tokens, decode_rows, load.mean_tokens)

    return LongPrompt(
        num_tokens=num_tokens,
        cost=work,
        seconds=seconds,
        real_s=seconds / terms.efficiency,
        decode_sequences=terms.decode_sequences,
        stalled_steps=stalled_steps(seconds, step_s),
        real_stalled_steps=stalled_steps(seconds / terms.efficiency, step_s),
        chunks=cut(0),
        mixed=cut(terms.decode_sequences),
        handoff_blocks=blocks_for(num_tokens, terms.block_size),
        handoff_bytes=moved,
        handoff_s=moved / machine.network_bytes_per_s,
    )


def plan_chunks(
    cost: ModelCost, machine: Machine, num_tokens: int, step_tokens: int, decode_rows: int, context_tokens: float
) -> tuple[ChunkStep, ...]:
    """The steps of one long prompt, each with decode_rows decoding sequences inside its budget of step_tokens."""
    rows = []
    for chunk in chunks(num_tokens, step_tokens, decode_rows):
        work = cost.prompt(chunk.num_tokens, chunk.past_tokens)
        seconds = work.total / machine.flops_per_s
        beside = cost.decode_flops(decode_rows, context_tokens) / machine.flops_per_s
        kv = chunk.past_tokens + chunk.num_tokens + decode_rows * context_tokens
        read_s = (cost.weight_bytes + kv * cost.token_bytes) / machine.bytes_per_s
        step_s = max(seconds + beside, read_s)
        rows.append(ChunkStep(chunk.past_tokens, chunk.num_tokens, work.linear, work.attention, seconds, step_s))
    return tuple(rows)


def stalled_steps(seconds: float, step_s: float) -> float:
    """Steps that everyone else in the batch waits for while something takes `seconds` in one piece."""
    return seconds / step_s
