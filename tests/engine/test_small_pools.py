"""Random workloads on pools of 3 to 40 blocks, with everything on: cached prefixes, forks, swapping, aborts.

Every sequence must give the tokens that it gives alone, for at most three times the work, and the pool must add up
after every step.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import pytest
from specs import hash_engine, sequences_of, spec

from engine.block_pool import BlockPool
from engine.budgets import Budgets
from engine.events import Event, Finished, Preempted, Sampled
from engine.hash_executor import HashExecutor
from engine.local import LocalEngine
from engine.plan import Plan
from engine.scheduler import Scheduler
from engine.swap_space import PreemptCosts
from kvrelay.requests import Priority, Sampling, SequenceKey, SequenceSpec

BATCHES = 25
WORKLOADS = 5000
MIXED = 2500
GROUPS = 3
"""Families of prompts that begin alike."""


@dataclass(frozen=True)
class Workload:
    num_blocks: int
    block_size: int
    budgets: Budgets
    cache: bool
    swap_slots: int
    mode: str
    specs: tuple[SequenceSpec, ...]
    arrive_at: tuple[int, ...]
    abort_at: dict[int, int]


def workload(seed: int) -> Workload:
    draw = random.Random(f"small pools {seed}")
    num_blocks, block_size = draw.randint(3, 40), draw.choice([1, 2, 4, 8])
    limit = min(num_blocks * block_size, 48)
    common = [[draw.randrange(256) for _ in range(limit)] for _ in range(GROUPS)]
    specs, arrive_at = [], []
    for number in range(draw.randint(1, 7)):
        prompt = draw.randint(1, max(1, int((limit - 1) * draw.choice([0.1, 0.4, 1]))))
        max_tokens = draw.randint(1, max(1, min(limit - prompt, int(limit * draw.choice([0.1, 0.3, 1])))))
        alike = draw.choice([0, prompt // 2, prompt])
        tokens = draw.choice(common)[:alike] + [draw.randrange(256) for _ in range(prompt - alike)]
        sampling = Sampling(temperature=float(number % 2), seed=number)
        one = spec(f"r{number}", tokens, max_tokens, sampling, stop=(257,))
        n = draw.choice([1, 1, 1, 2, 4])
        specs.append(replace(one, n=n, prefix_cache=draw.random() < 0.9, tenant=draw.choice(["a", "a", "b"])))
        arrive_at.append(draw.choice([0, 0, draw.randint(0, 30)]))
    return Workload(
        num_blocks,
        block_size,
        Budgets(draw.choice([3, 8, 64]), draw.choice([1, 2, 4, 16]), draw.choice([None, 1, 4])),
        draw.random() < 0.8,
        draw.choice([0, 3, 100]),
        draw.choice(["swap", "recompute", "auto"]),
        tuple(specs),
        tuple(sorted(arrive_at)),
        {number: draw.randint(1, 40) for number in range(len(specs)) if draw.random() < 0.1},
    )


def mixed(seed: int) -> Workload:
    """The same, each of a class of its own; a higher one often comes when the pool is full."""
    load, draw = workload(seed), random.Random(f"classes {seed}")
    specs = tuple(replace(one, priority=draw.choice(list(Priority))) for one in load.specs)
    arrive_at = tuple(sorted(draw.choice([0, at, draw.randint(0, 60)]) for at in load.arrive_at))
    return replace(load, specs=specs, arrive_at=arrive_at)


@cache
def _reference(block_size: int) -> LocalEngine:
    return hash_engine(128, block_size)[0]


class Run:
    def __init__(self, load: Workload) -> None:
        self.load = load
        self.pool = BlockPool(load.num_blocks, cache=load.cache)
        self.executor = HashExecutor(load.num_blocks, load.block_size, swap_blocks=load.swap_slots)
        self.scheduler = Scheduler(self.pool, load.block_size, load.budgets, swap_slots=load.swap_slots)
        self.scheduler.room.costs = PreemptCosts(load.mode, swap_s=1.0, compute_s=1.0)
        self.classes = {one.key.request_id: one.priority for one in load.specs}
        self.tokens: dict[SequenceKey, list[int]] = {}
        self.finished: Counter[SequenceKey] = Counter()
        self.preemptions: Counter[SequenceKey] = Counter()
        self.gone: set[SequenceKey] = set()
        self.computed = 0

    def to_the_end(self) -> None:
        waiting = list(zip(self.load.specs, self.load.arrive_at, strict=True))
        number = 0
        while waiting or self.scheduler.has_work:
            while waiting and (waiting[0][1] <= number or not self.scheduler.has_work):
                one = waiting.pop(0)[0]
                self.scheduler.add(one)
                self.tokens |= {s.key: [] for s in sequences_of(one)}
            self.abort(number)
            self.step()
            number += 1

    def abort(self, number: int) -> None:
        for index, at in self.load.abort_at.items():
            if at == number:
                for sequence in sequences_of(self.load.specs[index]):
                    if self.scheduler.abort(sequence.key):
                        self.gone.add(sequence.key)
                    elif sequence.key in self.tokens and not self.finished[sequence.key]:
                        self.gone.add(sequence.key)  # not forked yet

    def step(self) -> None:
        plan = self.scheduler.schedule()
        if plan is None:
            assert not self.scheduler.has_work, f"nothing can run with {self.scheduler.queued_tokens} tokens queued"
            return
        self.computed += plan.num_tokens
        events = self.scheduler.apply(plan, self.executor.run(plan))
        self.check_classes(plan, events)
        for event in events:
            if isinstance(event, Sampled):
                assert event.index == len(self.tokens[event.key]), f"{event.key} lost or doubled a token"
                self.tokens[event.key].append(event.token_id)
            self.finished[event.key] += isinstance(event, Finished)
            self.preemptions[event.key] += isinstance(event, Preempted)
        self.pool.check_integrity()

    def check_classes(self, plan: Plan, events: Sequence[Event]) -> None:
        """Nobody gave way in a step in which only lower classes went on."""
        best = max(self.classes[rows.key.request_id] for rows in plan.slices)
        gave_way = [self.classes[event.key.request_id] for event in events if isinstance(event, Preempted)]
        assert best >= max(gave_way, default=best), f"classes {gave_way} gave way for {best}"

    def close(self) -> None:
        self.executor.close()


def check(load: Workload) -> None:
    run = Run(load)
    try:
        run.to_the_end()
    finally:
        run.close()
    least = 0
    for one in load.specs:
        longest = 0
        for sequence in sequences_of(one):
            if sequence.key in run.gone:
                continue
            said = tuple(run.tokens[sequence.key])
            assert said == _reference(load.block_size).generate([sequence])[sequence.key]
            assert run.finished[sequence.key] == 1
            least += len(said) - 1
            longest = 1
        least += longest * one.num_prompt_tokens
    if not run.gone:
        assert run.computed <= 3 * least, f"{run.computed} tokens computed for {least}"
    assert max(run.preemptions.values(), default=0) <= 4
    counts = run.pool.counts()
    assert counts.free + counts.cached == load.num_blocks
    assert run.scheduler.room.free_slots == load.swap_slots
    assert run.scheduler.queued_tokens == 0


def check_all(made: Callable[[int], Workload], seeds: range) -> None:
    for seed in seeds:
        try:
            check(made(seed))
        except AssertionError as error:
            raise AssertionError(f"workload {seed}: {error}") from error


@pytest.mark.parametrize("batch", range(BATCHES))
def test_any_workload_on_any_small_pool_gives_the_tokens_of_each_sequence_alone(batch: int) -> None:
    check_all(workload, range(batch * WORKLOADS // BATCHES, (batch + 1) * WORKLOADS // BATCHES))


@pytest.mark.parametrize("batch", range(BATCHES))
def test_so_does_any_of_several_classes_of_priority(batch: int) -> None:
    check_all(mixed, range(batch * MIXED // BATCHES, (batch + 1) * MIXED // BATCHES))
