"""n sequences of one prompt: computed once, its blocks shared, the last partial one copied when somebody writes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from specs import alone, hash_engine, rows, sequences_of, spec

from engine.budgets import Budgets
from engine.events import Event, Finished, Preempted, Sampled
from engine.local import LocalEngine
from engine.swap_space import PreemptCosts
from kvrelay.blocks import BlockCounts
from kvrelay.requests import Sampling, SequenceKey, SequenceSpec

SEEDED = Sampling(temperature=1.0, seed=11)


def of_four(prompt: int, max_tokens: int) -> SequenceSpec:
    return replace(spec("a", prompt, max_tokens, SEEDED), n=4)


class Run:
    """Step by step, with what each sequence said so far."""

    def __init__(self, engine: LocalEngine) -> None:
        self.engine = engine
        self.said: dict[SequenceKey, list[int]] = {}
        self.preempted: list[SequenceKey] = []

    def step(self, abort: SequenceKey | None = None) -> bool:
        """False when nothing is left. abort: while the step is in flight."""
        scheduler = self.engine.scheduler
        plan = scheduler.schedule()
        if plan is None:
            assert not scheduler.has_work
            return False
        if abort is not None:
            scheduler.abort(abort)
        self.take(scheduler.apply(plan, self.engine.executor.run(plan)))
        return True

    def take(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, Sampled):
                self.said.setdefault(event.key, []).append(event.token_id)
            elif isinstance(event, Preempted):
                self.preempted.append(event.key)

    def to_the_end(self) -> None:
        while self.step():
            pass

    def assert_exact(self, one: SequenceSpec, but: SequenceKey | None = None) -> None:
        for sequence in sequences_of(one):
            if sequence.key != but:
                expected = alone(sequence, self.engine.executor.layout.block_size)
                assert tuple(self.said[sequence.key]) == expected, f"sequence {sequence.key.sequence}"


def test_four_sequences_of_1_000_tokens_compute_them_once_and_copy_three_blocks() -> None:
    engine, pool = hash_engine(200, 16, Budgets(2048))
    one = of_four(1_000, 20)
    run, scheduler = Run(engine), engine.scheduler
    engine.add(one)
    plan = scheduler.schedule()
    assert plan is not None
    assert rows(plan) == [("a", 0, 1_000)]
    assert plan.num_samples == 4
    events = scheduler.apply(plan, engine.executor.run(plan))
    first = [e for e in events if isinstance(e, Sampled)]
    assert [(e.key.sequence, e.index) for e in first] == [(0, 0), (1, 0), (2, 0), (3, 0)]
    assert len({e.token_id for e in first}) > 1, "each draws from a seed of its own"
    assert pool.counts().held == 63
    run.take(events)
    plan = scheduler.schedule()
    assert plan is not None
    assert plan.copies == ((62, 63), (62, 64), (62, 65))
    assert [s.table.block_ids for s in plan.slices] == [(*range(62), last) for last in (63, 64, 65, 62)]
    run.take(scheduler.apply(plan, engine.executor.run(plan)))
    # 63 of the prompt and 3 copies; what was generated so far stands in these last blocks.
    assert pool.counts().held == 66 < 1.1 * 63
    assert [pool.references(i) for i in (0, 61, 62, 63)] == [4, 4, 1, 1]
    most = 0
    while run.step():
        most = max(most, pool.counts().held)
    run.assert_exact(one)
    assert most == 63 + 3 + 4 * 1, "of each sequence 11 tokens of 19 are in a block of its own"
    assert scheduler.room.num_copied == 3
    assert pool.counts() == BlockCounts(200, 200)


@pytest.mark.parametrize("prompt", [16, 32])
def test_at_a_border_of_blocks_nothing_is_copied(prompt: int) -> None:
    engine, pool = hash_engine(64, 16)
    one = of_four(prompt, 20)
    run = Run(engine)
    engine.add(one)
    run.to_the_end()
    run.assert_exact(one)
    assert engine.scheduler.room.num_copied == 0
    assert pool.counts() == BlockCounts(64, 64)


def test_a_single_block_of_room_is_enough_for_the_last_of_them_to_write_in_place() -> None:
    """Two sequences, one partial block: the second writes where the prompt lies, once the first has its copy."""
    engine, pool = hash_engine(2, 16)
    one = replace(of_four(5, 4), n=2)
    run = Run(engine)
    engine.add(one)
    run.to_the_end()
    run.assert_exact(one)
    assert (engine.scheduler.room.num_copied, run.preempted) == (1, [])
    assert pool.counts() == BlockCounts(2, 2)


def test_without_room_for_a_copy_the_sharers_are_preempted_and_all_end_exactly() -> None:
    engine, pool = hash_engine(1, 16)
    one = of_four(5, 4)
    run = Run(engine)
    engine.add(one)
    run.to_the_end()
    run.assert_exact(one)
    assert engine.scheduler.room.num_copied == 0
    assert {k.sequence for k in run.preempted} == {1, 2, 3}
    assert pool.counts() == BlockCounts(1, 1)


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize("fork", range(4))
def test_each_of_them_preempted_alone_at_any_moment_goes_on_exactly(fork: int, mode: str, cache: bool) -> None:
    one = of_four(21, 18)
    key = replace(one.key, sequence=fork)
    for after in range(1, 17):
        engine, pool = hash_engine(40, 8, cache=cache, swap_slots=20)
        scheduler = engine.scheduler
        scheduler.room.costs = PreemptCosts(mode)
        run = Run(engine)
        engine.add(one)
        for _ in range(after):
            run.step()
        scheduler.room._preempt_all([scheduler._sequences[key]], last_resort=False)
        run.to_the_end()
        assert run.preempted == [key]
        run.assert_exact(one)
        assert pool.counts().held == 0
        assert scheduler.room.free_slots == 20
        pool.check_integrity()
        engine.executor.close()


@pytest.mark.parametrize("in_flight", [False, True])
@pytest.mark.parametrize("fork", range(4))
def test_an_abort_of_any_of_them_at_any_moment_harms_no_other(fork: int, in_flight: bool) -> None:
    one = of_four(21, 12)
    key = replace(one.key, sequence=fork)
    for after in range(1, 12):
        engine, pool = hash_engine(40, 8, cache=bool(after % 2))
        run = Run(engine)
        engine.add(one)
        for _ in range(after):
            run.step()
        if in_flight:
            run.step(abort=key)
        else:
            engine.abort(key)
        run.to_the_end()
        run.assert_exact(one, but=key)
        assert pool.counts().held == 0
        pool.check_integrity()
        engine.executor.close()


def test_an_abort_before_the_fork_ends_all_of_them() -> None:
    engine, pool = hash_engine(40, 8, Budgets(max_tokens=8))
    one = of_four(21, 12)
    run = Run(engine)
    engine.add(one)
    run.step()
    assert engine.abort(one.key)
    run.to_the_end()
    assert run.said == {}
    assert pool.counts() == BlockCounts(40, 40)


def test_a_sequence_whose_first_token_ends_it_leaves_the_others_running() -> None:
    one = of_four(21, 6)
    firsts = [alone(s, 8)[0] for s in sequences_of(one)]
    assert len(set(firsts)) > 1
    stopping = replace(one, stop=replace(one.stop, stop_token_ids=frozenset({firsts[1]})))
    engine, pool = hash_engine(40, 8)
    events = list(engine.stream([stopping]))
    ended = [(e.key.sequence, e.num_tokens) for e in events if isinstance(e, Finished)]
    assert ended[0] == (1, 1)
    assert sorted(s for s, _ in ended) == [0, 1, 2, 3]
    for sequence in sequences_of(stopping):
        assert tuple(e.token_id for e in events if isinstance(e, Sampled) and e.key == sequence.key) == alone(
            sequence, 8
        )
    assert pool.counts() == BlockCounts(40, 40)


def test_sequences_of_a_prompt_found_in_the_cache_are_exact_too() -> None:
    engine, pool = hash_engine(64, 16, cache=True)
    for name, prompt in (("a", 32), ("b", 32), ("c", 40)):
        one = replace(of_four(prompt, 12), key=spec(name, 1).key)
        run = Run(engine)
        engine.add(one)
        run.to_the_end()
        run.assert_exact(one)
        assert pool.counts().held == 0
    pool.check_integrity()
