"""How many workers of each role a load needs, and what batch and step each of them then sees. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from kvrelay.errors import InvalidArgument
from kvrelay.planning.cost import ModelCost, plan_step
from kvrelay.planning.given import Load, Machine, Terms
from kvrelay.sizing import handoff_bytes

ROUNDS = 200
"""Enough for batch and step time to settle: each round brings them nearer by the share that is not at capacity."""


@dataclass(frozen=True, slots=True)
class Workers:
    """What a load needs, at the efficiency: workers as exact shares and as whole ones.

    batch, tbt_s: of each whole decode worker under this load. full_batch: the largest that pool, limits and the
    longest step wanted allow. network: share of one decode worker's network that arriving KV takes.
    """

    prefill: float
    decode: float
    num_prefill: int
    num_decode: int
    prompt_s: float
    handoff_s: float
    full_batch: int
    batch: float
    tbt_s: float
    network: float

    @property
    def prefill_per_decode(self) -> float:
        return self.prefill / self.decode


def plan_workers(cost: ModelCost, machine: Machine, load: Load, terms: Terms, most_sequences: int) -> Workers:
    """most_sequences: what a pool holds. InvalidArgument(tbt_ms) when a batch of one is slower than wanted."""
    prompt_s = cost.prompt(load.prompt_tokens).total / machine.flops_per_s / terms.efficiency
    moved = handoff_bytes(load.prompt_tokens, terms.block_size, cost.token_bytes)

    def step_s(num_sequences: float) -> float:
        return real_step_s(cost, machine, load, terms, num_sequences)

    full_batch = largest_batch(cost, machine, load, terms, most_sequences)
    prefill = load.rate * prompt_s
    decode = load.rate * load.output_tokens * step_s(full_batch) / full_batch
    num_decode = max(1, math.ceil(decode))
    batch = _settled(lambda b: load.rate / num_decode * load.output_tokens * step_s(b), full_batch)
    return Workers(
        prefill=prefill,
        decode=decode,
        num_prefill=max(1, math.ceil(prefill)),
        num_decode=num_decode,
        prompt_s=prompt_s,
        handoff_s=moved / machine.network_bytes_per_s,
        full_batch=full_batch,
        batch=batch,
        tbt_s=step_s(max(1.0, batch)),
        network=load.rate / num_decode * moved / machine.network_bytes_per_s,
    )


def largest_batch(cost: ModelCost, machine: Machine, load: Load, terms: Terms, most_sequences: int) -> int:
    """As many as pool, --max-sequences and the longest step wanted allow. InvalidArgument(tbt_ms) if that is none."""
    low, high = 1, max(1, min(most_sequences, terms.max_sequences))
    if not terms.tbt_s:
        return high
    alone_s = real_step_s(cost, machine, load, terms, 1)
    if alone_s > terms.tbt_s:
        raise InvalidArgument(
            f"--tbt-ms {terms.tbt_s * 1e3:g}: a step of one sequence alone takes {alone_s * 1e3:.3g} ms",
            field="--tbt-ms",
        )
    while low < high:
        middle = (low + high + 1) // 2
        if real_step_s(cost, machine, load, terms, middle) <= terms.tbt_s:
            low = middle
        else:
            high = middle - 1
    return low


def real_step_s(cost: ModelCost, machine: Machine, load: Load, terms: Terms, num_sequences: float) -> float:
    """A decode step at the efficiency reached. num_sequences may be a mean."""
    below = math.floor(num_sequences)
    step = plan_step(cost, machine, below, load.mean_tokens).seconds
    above = plan_step(cost, machine, below + 1, load.mean_tokens).seconds
    return (step + (above - step) * (num_sequences - below)) / terms.efficiency


def _settled(next_batch: Callable[[float], float], most: int) -> float:
    """The batch that a load keeps running: more of it makes steps longer, which makes more of it."""
    batch = 0.0
    for _ in range(ROUNDS):
        batch = min(float(most), next_batch(batch))
    return batch
