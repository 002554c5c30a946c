"""Streams of the hash model beside whatever a test does: each must be, token for token, what one process gives."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import cache

from support.golden import B, Case, ask, references

from engine.hash_executor import HashExecutor
from kvrelay.client import AsyncClient, AsyncStream
from kvrelay.models.builtin import BUILTIN_EOS, BUILTIN_VOCAB


@contextmanager
def _one_process() -> Iterator[HashExecutor]:
    executor = HashExecutor(256, B, BUILTIN_VOCAB, BUILTIN_EOS)
    try:
        yield executor
    finally:
        executor.close()


@cache
def answer_of(case: Case) -> tuple[int, ...]:
    """What one process gives, EOS ignored."""
    with _one_process() as executor:
        return references(executor, [case])[0]


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    """Random bytes; the same ones for the same arguments."""
    rng = random.Random(f"{seed} {length}")
    return tuple(rng.randrange(256) for _ in range(length))


def case_of(length: int, max_tokens: int, seed: int = 0) -> Case:
    """A greedy case with a prompt of its own."""
    return Case(prompt_of(length, seed), max_tokens, None)


async def assert_exact(target: str, *cases: Case) -> None:
    """All at once; each answer must be that of one process."""
    async with AsyncClient(target) as client:
        results = await asyncio.gather(*(ask(client, case) for case in cases))
    assert [r.token_ids for r in results] == [answer_of(case) for case in cases]


@dataclass
class Neighbour:
    """How often the case was answered in full so far."""

    answered: int = 0


@asynccontextmanager
async def neighbour(target: str, case: Case, times: int = 1_000_000) -> AsyncIterator[Neighbour]:
    """Ask one case over and over beside the body, at most so many times; each answer must be that of one process.

    The first has its token 0 when the body begins; after the body the last one is read to its end.
    """
    expected, beside, stop, begun = answer_of(case), Neighbour(), asyncio.Event(), asyncio.Event()

    async def keep_asking() -> None:
        async with AsyncClient(target) as client:
            while not stop.is_set() and beside.answered < times:
                stream = stream_of(client, case)
                async for _ in stream:
                    begun.set()
                assert stream.result.token_ids == expected
                assert [t.index for t in stream.tokens] == list(range(case.max_tokens))
                beside.answered += 1

    task, waiting = asyncio.create_task(keep_asking()), asyncio.create_task(begun.wait())
    try:
        await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
        yield beside
        stop.set()
        await task
        assert beside.answered
    finally:
        for pending in (waiting, task):
            pending.cancel()
        await asyncio.gather(waiting, task, return_exceptions=True)


def stream_of(client: AsyncClient, case: Case) -> AsyncStream:
    """The case as a stream not yet begun."""
    return client.generate(
        list(case.prompt), max_tokens=case.max_tokens, temperature=0.0, ignore_eos=True, deadline_s=60.0
    )


def mixed_cases() -> list[Case]:
    """Short and long prompts and answers, around the borders of blocks, greedy and seeded in turn."""
    sizes = [(40, 120), (200, 60), (17, 90), (400, 30), (1, 100), (16, 80)]
    return [
        Case(prompt_of(length, i), max_tokens, 7 + i if i % 2 else None) for i, (length, max_tokens) in enumerate(sizes)
    ]


def new_and_known() -> Iterator[Case]:
    """Without end, in turn: a long prompt of eleven chunks that no cache has seen, and one of the mixed cases again."""
    for number, known in enumerate(itertools.cycle(mixed_cases())):
        yield Case(prompt_of(700, 1000 + number), 12, number if number % 2 else None)
        yield known
