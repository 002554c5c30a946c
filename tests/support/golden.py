"""Golden cases: prompts and sampling, and the tokens that one process without any split gives for them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass

from engine.block_pool import BlockPool
from engine.budgets import Budgets
from engine.executor import Executor
from engine.local import LocalEngine
from engine.scheduler import Scheduler
from kvrelay.client import AsyncClient, GenerateResult
from kvrelay.requests import RequestId, Sampling, SequenceKey, SequenceSpec, SessionId, StopRule

B = 16
LENGTHS = (1, B - 1, B, B + 1, 5 * B + 3, 1003)


@dataclass(frozen=True, slots=True)
class Case:
    """seed None is greedy. EOS is ignored, so that every case has exactly max_tokens tokens."""

    prompt: tuple[int, ...]
    max_tokens: int
    seed: int | None

    @property
    def sampling(self) -> Sampling:
        return Sampling(temperature=0.0) if self.seed is None else Sampling(1.0, 0.95, 0, self.seed)


def make_cases(vocab: int, lengths: Sequence[int] = LENGTHS, max_tokens: int = 24) -> list[Case]:
    """For every length a greedy and a seeded case, with random prompts."""
    rng = random.Random(11)
    return [
        Case(tuple(rng.randrange(vocab) for _ in range(length)), max_tokens, seed)
        for length in lengths
        for seed in (None, 1000 + length)
    ]


def references(executor: Executor, cases: Sequence[Case]) -> list[tuple[int, ...]]:
    """Each case alone, in one process."""
    answers = []
    for i, case in enumerate(cases):
        pool = BlockPool(executor.pool.num_blocks)
        engine = LocalEngine(executor, Scheduler(pool, B, Budgets()))
        key = SequenceKey(SessionId("local"), RequestId(str(i)), 1)
        spec = SequenceSpec(key, case.prompt, len(case.prompt), case.sampling, StopRule(case.max_tokens))
        answers.append(tuple(engine.generate([spec])[key]))
    return answers


async def ask(client: AsyncClient, case: Case) -> GenerateResult:
    """One case over the wire; checks on the way that indexes are contiguous."""
    sampling = case.sampling
    stream = client.generate(
        list(case.prompt),
        max_tokens=case.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        ignore_eos=True,
        deadline_s=100.0,
    )
    indexes = [token.index async for token in stream]
    assert indexes == list(range(case.max_tokens))
    return stream.result


async def ask_alone(target: str, cases: Sequence[Case]) -> list[GenerateResult]:
    async with AsyncClient(target) as client:
        return [await ask(client, case) for case in cases]


async def ask_together(target: str, cases: Sequence[Case]) -> list[GenerateResult]:
    async with AsyncClient(target) as client:
        return list(await asyncio.gather(*(ask(client, case) for case in cases)))
