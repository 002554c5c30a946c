"""Penalties, biases, floors and log-probabilities over whole streams: at every step what a reference says, whatever
becomes of the sequence on the way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from reference_draws import Rows, drawn_from, reshaped, same, told
from specs import sequences_of, spec
from support.tiny_llama import random_llama

from engine.block_pool import BlockPool
from engine.budgets import Budgets
from engine.events import Finished, Preempted, Sampled
from engine.executor import Executor
from engine.hash_executor import HashExecutor
from engine.local import LocalEngine
from engine.scheduler import Scheduler
from engine.swap_space import PreemptCosts
from engine.torch_executor import TorchExecutor, TorchOptions
from kvrelay.blocks import blocks_for
from kvrelay.requests import Logprobs, Sampling, SequenceKey, SequenceSpec

ALL = Sampling(1.0, seed=5, repetition_penalty=1.3, presence_penalty=0.7, frequency_penalty=0.4)
GREEDY = replace(ALL, temperature=0.0)
SLOTS = 48

Make = Callable[[int], Executor]


@dataclass
class Served:
    """What came of sequences. Each index comes once and in order."""

    tokens: dict[SequenceKey, list[int]] = field(default_factory=dict)
    logprobs: dict[SequenceKey, list[Logprobs | None]] = field(default_factory=dict)
    finished: Counter[SequenceKey] = field(default_factory=Counter)
    preempted: Counter[SequenceKey] = field(default_factory=Counter)

    def step(self, engine: LocalEngine) -> None:
        for event in engine.step():
            if isinstance(event, Sampled):
                tokens = self.tokens.setdefault(event.key, [])
                assert event.index == len(tokens)
                tokens.append(event.token_id)
                self.logprobs.setdefault(event.key, []).append(event.logprobs)
            self.finished[event.key] += isinstance(event, Finished)
            self.preempted[event.key] += isinstance(event, Preempted)


def preempt_everyone(engine: LocalEngine) -> None:
    scheduler = engine.scheduler
    scheduler.room._preempt_all(list(scheduler._queues.running), last_resort=False)


def serve(
    executor: Executor, specs: list[SequenceSpec], budgets: Budgets, *, preempt_every: int = 0, cache: bool = False
) -> Served:
    swap_slots = SLOTS if executor.swap is not None else 0
    pool = BlockPool(executor.pool.num_blocks, cache=cache)
    scheduler = Scheduler(pool, executor.layout.block_size, budgets, swap_slots=swap_slots)
    scheduler.room.costs = PreemptCosts("swap" if swap_slots else "recompute")
    engine, served = LocalEngine(executor, scheduler), Served()
    for one in specs:
        engine.add(one)
    step = 0
    while scheduler.has_work:
        step += 1
        served.step(engine)
        if preempt_every and step % preempt_every == 0:
            preempt_everyone(engine)
    assert served.finished == Counter({s.key: 1 for one in specs for s in (sequences_of(one) if one.n > 1 else [one])})
    assert pool.counts().held == 0
    return served


def assert_as_the_reference(rows: Rows, served: Served, one: SequenceSpec) -> None:
    """At every index, from the very logits of that index."""
    for sequence in sequences_of(one):
        output, prompt = served.tokens[sequence.key], sequence.token_ids
        for index, token in enumerate(output):
            row, banned = rows.of[sequence.key, index], one.stop.banned(index)
            logits = reshaped(row, sequence.sampling, prompt, output[:index], banned)
            assert token == drawn_from(logits, sequence.sampling, index), f"{sequence.key} at {index}"
            said, count = served.logprobs[sequence.key][index], sequence.sampling.logprobs
            assert said is None if count is None else same(said, told(row, token, count))


def requests() -> list[SequenceSpec]:
    """Of every kind, with prompts at borders of blocks; the last one asks for nothing."""
    floor = replace(spec("floor", 16, 30, replace(ALL, seed=8), stop=range(0, 200)))
    return [
        spec("all", 37, 40, replace(ALL, logprobs=5)),
        spec("greedy", 15, 40, replace(GREEDY, logprobs=0)),
        replace(spec("three", 17, 24, replace(ALL, seed=9, logprobs=2)), n=3),
        spec("bias", 1, 24, Sampling(1.0, seed=4, min_p=0.05, logit_bias=((65, 4.0), (66, -3.0)), logprobs=1)),
        replace(floor, stop=replace(floor.stop, min_tokens=20)),
        spec("plain", 20, 40, Sampling(1.0, seed=3)),
    ]


@pytest.fixture(params=["hash", "llama"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    made: list[Executor] = []
    if request.param == "llama":
        random_llama(tmp_path)

    def one(swap_blocks: int) -> Executor:
        if request.param == "hash":
            made.append(HashExecutor(64, 16, swap_blocks=swap_blocks))
        else:
            options = TorchOptions(dtype="float32", num_blocks=64, swap_blocks=swap_blocks)
            made.append(TorchExecutor(tmp_path, options))
        return made[-1]

    yield one
    for executor in made:
        executor.close()


@pytest.mark.parametrize(
    ("budgets", "preempt_every", "swap", "cache"),
    [
        (Budgets(), 0, False, False),
        (Budgets(max_tokens=7), 0, False, True),
        (Budgets(max_tokens=64, max_prefill_tokens=3), 9, False, False),
        (Budgets(max_tokens=20), 7, False, True),
        (Budgets(), 8, True, False),
    ],
    ids=["batch", "chunks", "preempted", "preempted and found again", "swapped"],
)
def test_every_token_and_its_logprobs_are_the_references(
    make: Make, monkeypatch: pytest.MonkeyPatch, budgets: Budgets, preempt_every: int, swap: bool, cache: bool
) -> None:
    executor = make(SLOTS if swap else 0)
    rows = Rows(monkeypatch)
    served = serve(executor, requests(), budgets, preempt_every=preempt_every, cache=cache)
    if preempt_every:
        assert min(served.preempted[one.key] for one in requests() if one.stop.min_tokens == 0) >= 2
    for one in requests():
        if one.sampling.plain and isinstance(executor, HashExecutor):
            continue  # needs no logits
        assert_as_the_reference(rows, served, one)
    for one in requests():
        for sequence in sequences_of(one):
            rows.of.clear()
            alone = serve(executor, [sequence], Budgets())
            assert served.tokens[sequence.key] == alone.tokens[sequence.key], sequence.key
            pairs = zip(served.logprobs[sequence.key], alone.logprobs[sequence.key], strict=True)
            assert all(b is None if a is None else b is not None and same(a, b, 1e-4) for a, b in pairs)


def test_a_floor_of_tokens_holds_back_every_stop_token_until_then(make: Make) -> None:
    [floor] = [one for one in requests() if one.stop.min_tokens]
    tokens = serve(make(0), [floor], Budgets()).tokens[floor.key]
    assert len(tokens) >= 21
    assert all(token not in floor.stop.stop_token_ids for token in tokens[:-1])
    assert tokens[-1] in floor.stop.stop_token_ids or len(tokens) == 30


def test_twenty_requests_of_256_tokens_preempted_three_times_each_are_those_that_never_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    specs = [spec(f"r{i}", 3 + i, 256, replace(ALL, temperature=float(i % 2), seed=i)) for i in range(20)]
    executor = HashExecutor(400, 16)
    served = serve(executor, specs, Budgets(), preempt_every=70)
    undisturbed = serve(executor, specs, Budgets())
    assert min(served.preempted[one.key] for one in specs) >= 3
    assert not +undisturbed.preempted
    assert served.tokens == undisturbed.tokens
    assert {len(tokens) for tokens in served.tokens.values()} == {256}
    executor.close()


def test_a_sequence_handed_over_after_any_token_goes_on_as_if_it_had_stayed() -> None:
    """With the KV of all but its last token, as from a prefill worker, and with none of it, as after a worker's end."""
    one = spec("moved", 21, 24, replace(ALL, logprobs=2))
    first = HashExecutor(8, 16)
    stayed = serve(first, [one], Budgets())
    tokens, logprobs = stayed.tokens[one.key], stayed.logprobs[one.key]
    for after in range(1, 24):
        known = (*one.token_ids, *tokens[:after])
        moved = replace(one, token_ids=known)
        for num_computed in (0, len(known) - 1):
            pool, executor = BlockPool(8), HashExecutor(8, 16)
            scheduler = Scheduler(pool, 16, Budgets())
            blocks = pool.allocate(blocks_for(num_computed, 16))
            assert blocks is not None
            for at, block_id in enumerate(blocks):  # a pool of its own has lain its blocks out in the same order
                executor.pool.write(block_id, 0, first.pool.read(at))
            scheduler.add(moved, block_ids=blocks, num_computed=num_computed)
            came = [e for e in LocalEngine(executor, scheduler).stream([]) if isinstance(e, Sampled)]
            assert [(e.index, e.token_id, e.logprobs) for e in came] == [
                (i, tokens[i], logprobs[i]) for i in range(after, 24)
            ]
            executor.close()
    first.close()


@pytest.mark.parametrize("extra", [{}, {"logprobs": 0}, {"presence_penalty": 0.5}], ids=str)
def test_sixteen_seeds_at_once_each_give_what_they_give_alone(make: Make, extra: dict[str, float]) -> None:
    specs = [spec("x" * i, [65, 66, 67], 12, Sampling(1.0, 1.0, 320, seed=i, **extra)) for i in range(16)]
    executor = make(0)
    together = serve(executor, specs, Budgets()).tokens
    assert {s.key: serve(executor, [s], Budgets()).tokens[s.key] for s in specs} == together
    assert len({tuple(tokens) for tokens in together.values()}) >= 12
