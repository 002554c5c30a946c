"""Load in an open and in a closed loop. Knows no client: a `Runner` does one request and fills its sample."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from kvrelay.cli.bench_stats import Sample

Prompt = tuple[int, ...]
Runner = Callable[[Sample, Prompt, int], Awaitable[None]]
"""(sample, prompt, output tokens): appends to sample.tokens_at_s as tokens come, puts an error's code into it."""


@dataclass(frozen=True, slots=True)
class Workload:
    """requests prompts of prompt_tokens random ids, output_tokens of answer each.

    rate (requests a second, Poisson) makes an open loop; without it `concurrency` requests are always under way.
    """

    requests: int = 32
    prompt_tokens: int = 128
    output_tokens: int = 128
    concurrency: int = 8
    rate: float | None = None
    seed: int = 0


def random_prompts(number: int, length: int, vocab_size: int, seed: int) -> list[Prompt]:
    """Prompts that share no prefix but by chance, the same for the same seed."""
    draw = random.Random(seed)
    return [tuple(draw.choices(range(vocab_size), k=length)) for _ in range(number)]


def poisson_arrivals(number: int, rate: float, seed: int) -> list[float]:
    """Seconds from the start at which requests are due; the first at once."""
    draw = random.Random(seed)
    times = [0.0]
    while len(times) < number:
        times.append(times[-1] + draw.expovariate(rate))
    return times[:number]


async def run_load(
    work: Workload, prompts: Sequence[Prompt], run: Runner, on_done: Callable[[], None]
) -> tuple[list[Sample], float]:
    """All samples, in the order of the prompts, and the seconds from the first request to the last end."""
    began = time.perf_counter()
    if work.rate is None:
        samples = await _closed(work, prompts, run, on_done)
    else:
        samples = await _open(work, prompts, run, on_done)
    return samples, time.perf_counter() - began


async def _closed(work: Workload, prompts: Sequence[Prompt], run: Runner, on_done: Callable[[], None]) -> list[Sample]:
    samples = [Sample(0.0, len(prompt)) for prompt in prompts]
    waiting = iter(list(zip(samples, prompts, strict=True)))

    async def client() -> None:
        for sample, prompt in waiting:
            sample.due_s = time.perf_counter()
            await run(sample, prompt, work.output_tokens)
            on_done()

    async with asyncio.TaskGroup() as group:
        for _ in range(min(work.concurrency, len(prompts))):
            group.create_task(client())
    return samples


async def _open(work: Workload, prompts: Sequence[Prompt], run: Runner, on_done: Callable[[], None]) -> list[Sample]:
    assert work.rate is not None
    began = time.perf_counter()
    arrivals = poisson_arrivals(len(prompts), work.rate, work.seed)
    samples = [Sample(began + due, len(prompt)) for due, prompt in zip(arrivals, prompts, strict=True)]

    async def one(sample: Sample, prompt: Prompt) -> None:
        await run(sample, prompt, work.output_tokens)
        on_done()

    async with asyncio.TaskGroup() as group:
        for sample, prompt in zip(samples, prompts, strict=True):
            await asyncio.sleep(max(0.0, sample.due_s - time.perf_counter()))
            group.create_task(one(sample, prompt))
    return samples
