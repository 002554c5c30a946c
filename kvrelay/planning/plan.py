"""What a model needs of a machine: pool, batches, steps, chunks, hand-off, workers for a load. Measures nothing.

1. `model_cost` turns a model's shape into bytes and operations a token.
2. `make_plan` puts it on a machine: everything `kvrelay plan` shows, as one value.

Times are bounds at the machine's full figures, except where `efficiency`, the share of them that is reached, counts in.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.batching import continuous_batching, spread_lengths, static_batching
from kvrelay.errors import InvalidArgument
from kvrelay.models.config import ModelConfig
from kvrelay.planning.cost import DecodeStep, ModelCost, model_cost, plan_step
from kvrelay.planning.given import Load, Machine, Terms
from kvrelay.planning.long_prompt import LongPrompt, plan_long_prompt
from kvrelay.planning.workers import Workers, plan_workers
from kvrelay.sizing import Fit, paged, pool_bytes, pool_tokens, preallocated

MIXED_REQUESTS, MIXED_ROWS = 1024, 32
"""What static and continuous batching are compared with."""


@dataclass(frozen=True, slots=True)
class Pool:
    """The KV pool of one worker, and how many requests of mean length it holds both ways."""

    num_bytes: int
    num_tokens: int
    num_blocks: int
    mean_tokens: float
    paged: Fit
    preallocated: Fit


@dataclass(frozen=True, slots=True)
class Plan:
    """static, continuous: share of rows that compute when a batch waits for its longest answer, and when it doesn't."""

    model: ModelCost
    machine: Machine
    load: Load
    terms: Terms
    pool: Pool
    steps: tuple[DecodeStep, ...]
    long_prompt: LongPrompt
    workers: Workers
    static: float
    continuous: float
    notes: tuple[str, ...] = ()


def make_plan(config: ModelConfig, machine: Machine, load: Load, terms: Terms) -> Plan:
    """InvalidArgument names the figure that leaves no room or no step, or asks for more than the model has."""
    cost = model_cost(config, terms.dtype)
    _require_served(cost, load)
    pool = plan_pool(cost, machine, load, terms)
    lengths = spread_lengths(load.output_tokens, MIXED_REQUESTS)
    return Plan(
        model=cost,
        machine=machine,
        load=load,
        terms=terms,
        pool=pool,
        steps=tuple(plan_step(cost, machine, n, load.mean_tokens) for n in batch_sizes(pool)),
        long_prompt=plan_long_prompt(cost, machine, load, terms),
        workers=plan_workers(cost, machine, load, terms, pool.paged.num_requests),
        static=static_batching(lengths, MIXED_ROWS).useful,
        continuous=continuous_batching(lengths, MIXED_ROWS).useful,
        notes=_notes(cost, terms),
    )


def plan_pool(cost: ModelCost, machine: Machine, load: Load, terms: Terms) -> Pool:
    """InvalidArgument(memory_gb) when not even one request of mean length fits."""
    num_bytes = pool_bytes(machine.memory_bytes, terms.usable, cost.weight_bytes, terms.reserve_bytes)
    fit = paged(num_bytes, cost.token_bytes, terms.block_size, load.mean_tokens)
    if fit.num_requests < 1:
        need = (cost.weight_bytes + terms.reserve_bytes) / 1e9
        room = machine.memory_bytes * terms.usable / 1e9
        raise InvalidArgument(
            f"--memory-gb {machine.memory_bytes / 1e9:g}: {room:.4g} GB are usable, weights and reserve take "
            f"{need:.4g} GB, which leaves no room for one request of {load.mean_tokens:g} tokens",
            field="--memory-gb",
        )
    tokens = pool_tokens(num_bytes, cost.token_bytes)
    whole = preallocated(num_bytes, cost.token_bytes, cost.max_positions, load.mean_tokens)
    return Pool(num_bytes, tokens, tokens // terms.block_size, load.mean_tokens, fit, whole)


def batch_sizes(pool: Pool) -> tuple[int, ...]:
    """Steps worth showing: 1, 8, 32, 128 ... as far as the pool goes, and what fits either way."""
    most = pool.paged.num_requests
    regular = {1, *(8 * 4**i for i in range(12))}
    return tuple(sorted(n for n in regular | {pool.preallocated.num_requests, most} if 0 < n <= most))


def _require_served(cost: ModelCost, load: Load) -> None:
    total = load.prompt_tokens + load.output_tokens
    if total > cost.max_positions:
        raise InvalidArgument(
            f"--prompt-tokens {load.prompt_tokens} and --output-tokens {load.output_tokens} make {total} tokens, "
            f"the model has {cost.max_positions} positions",
            field="--prompt-tokens",
        )


def _notes(cost: ModelCost, terms: Terms) -> tuple[str, ...]:
    """What the figures do not say."""
    if terms.long_prompt <= cost.max_positions:
        return ()
    return (f"a prompt of {terms.long_prompt} tokens is longer than the model's {cost.max_positions} positions",)
