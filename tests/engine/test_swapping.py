"""Blocks put aside in host memory and brought back: which moves, in which order, and that nothing else reaches them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
from specs import hash_engine, key, rows, sequences_of, spec
from support.steps import part

from engine.block_pool import BlockPool
from engine.events import Event, Matched, Preempted, Sampled
from engine.hash_executor import HashExecutor
from engine.local import LocalEngine
from engine.moves import carry_out
from engine.plan import Plan
from engine.swap_space import PreemptCosts, SwapSpace
from kvrelay.blocks import BlockCounts
from kvrelay.requests import Sampling, SequenceKey, SequenceSpec


def swapping(num_blocks: int, block_size: int, swap_slots: int, **more: bool) -> tuple[LocalEngine, BlockPool]:
    engine, pool = hash_engine(num_blocks, block_size, swap_slots=swap_slots, **more)
    engine.scheduler.room.costs = PreemptCosts("swap")
    return engine, pool


def stepped(engine: LocalEngine) -> Iterator[tuple[Plan, tuple[Event, ...]]]:
    scheduler = engine.scheduler
    while scheduler.has_work:
        plan = scheduler.schedule()
        if plan is None:
            assert not scheduler.has_work
            return
        yield plan, scheduler.apply(plan, engine.executor.run(plan))


def test_the_preempted_sequence_lies_in_host_memory_and_goes_on_without_computing_anything_again() -> None:
    engine, pool = swapping(3, 2, swap_slots=4)
    engine.add(spec("old", 1, 5))
    engine.add(spec("young", 1, 3))
    seen = list(stepped(engine))
    assert [(rows(plan), plan.swap_out, plan.swap_in) for plan, _ in seen] == [
        ([("old", 0, 1), ("young", 0, 1)], (), ()),
        ([("old", 1, 1), ("young", 1, 1)], (), ()),
        ([("old", 2, 1)], (), ()),
        ([("old", 3, 1)], (), ()),
        ([("old", 4, 1)], ((1, 0),), ()),
        ([("young", 2, 1)], (), ((0, 0),)),
    ]
    assert seen[4][1][0] == Preempted(key("young"), 2, swapped=True)
    assert seen[5][1][0] == Matched(key("young"), 2)
    assert engine.scheduler.room.free_slots == 4
    assert pool.counts() == BlockCounts(3, 3)


def test_the_block_that_was_put_aside_is_filled_anew_in_the_same_step() -> None:
    """Old takes block 1 in the very plan that empties it: the table names it, and the move comes before the write."""
    engine, _ = swapping(3, 2, swap_slots=4)
    engine.add(spec("old", 1, 5))
    engine.add(spec("young", 1, 3))
    *_, (plan, _events) = (step for step in stepped(engine) if step[0].swap_out)
    assert plan.swap_out == ((1, 0),)
    assert plan.slices[0].table.block_ids == (0, 2, 1)


def test_moves_are_carried_out_in_the_order_that_a_plan_promises() -> None:
    """Out, copies, in: block 0 is read before 1 is copied over it, and 1 is read before slot 0 is put there."""
    executor = HashExecutor(2, 1, swap_blocks=1)
    first, second = bytes([1]) * 64, bytes([2]) * 64
    executor.pool.write(0, 0, first)
    executor.pool.write(1, 0, second)
    carry_out(Plan(1, (), copies=((1, 0),), swap_out=((0, 0),), swap_in=((0, 1),)), executor.pool, executor.swap)
    assert (bytes(executor.pool.read(0)), bytes(executor.pool.read(1))) == (second, first)
    executor.close()


def test_a_plan_that_swaps_needs_memory_for_it() -> None:
    executor = HashExecutor(2, 1)
    with pytest.raises(AssertionError, match="step 1 swaps, and there is no memory for it"):
        executor.run(Plan(1, (part("a", [1], 0, [0], block_size=1),), swap_out=((1, 0),)))
    executor.close()


def test_a_full_space_falls_back_to_computing_again() -> None:
    engine, _ = swapping(6, 2, swap_slots=1)
    engine.add(spec("old", 3, 9))
    engine.add(spec("young", 3, 5))
    seen = list(stepped(engine))
    lost = [e for _, events in seen for e in events if isinstance(e, Preempted)]
    assert lost == [Preempted(key("young"), 6, swapped=False)]
    assert engine.scheduler.room.free_slots == 1


@pytest.mark.parametrize(
    ("costs", "num_blocks", "num_tokens", "swaps"),
    [
        (PreemptCosts("swap", swap_s=9.0), 4, 1, True),
        (PreemptCosts("recompute", compute_s=9.0), 1, 64, False),
        (PreemptCosts("auto"), 4, 64, False),  # nothing measured yet
        (PreemptCosts("auto", swap_s=0.001, compute_s=0.0001), 4, 64, False),  # 8 ms there and back against 6.4
        (PreemptCosts("auto", swap_s=0.001, compute_s=0.000125), 4, 64, False),  # 8 against 8
        (PreemptCosts("auto", swap_s=0.001, compute_s=0.0002), 4, 64, True),  # 8 against 12.8
        (PreemptCosts("auto", swap_s=0.001, compute_s=0.0002), 4, 33, False),  # the last block is almost empty
        (PreemptCosts("auto", swap_s=0.0, compute_s=0.0002), 4, 64, True),
    ],
)
def test_the_cheaper_way_is_taken(costs: PreemptCosts, num_blocks: int, num_tokens: int, swaps: bool) -> None:
    assert costs.prefers_swap(num_blocks, num_tokens) is swaps


@pytest.mark.parametrize(("compute_s", "swapped"), [(1.0, False), (3.0, True)])
def test_auto_decides_for_each_preemption_by_what_was_measured(compute_s: float, swapped: bool) -> None:
    engine, _ = swapping(3, 2, swap_slots=4)
    engine.scheduler.room.costs = PreemptCosts("auto", swap_s=2.0, compute_s=compute_s)
    engine.add(spec("old", 1, 5))
    engine.add(spec("young", 1, 3))  # one block of two tokens: 4 s to move, 2 or 6 s to compute
    assert [e.swapped for _, events in stepped(engine) for e in events if isinstance(e, Preempted)] == [swapped]


def test_slots_are_given_back_once_and_reused_last_given_first() -> None:
    space = SwapSpace(3)
    assert space.take(4) is None
    assert space.take(2) == (0, 1)
    assert space.take(2) is None
    space.give_back((0, 1))
    assert (space.num_free, space.take(3)) == (3, (0, 1, 2))
    space.give_back((1,))
    with pytest.raises(AssertionError, match="is free already"):
        space.give_back((1,))


def test_blocks_still_cached_when_it_comes_back_are_not_brought_from_host_memory() -> None:
    engine, pool = swapping(12, 2, swap_slots=8, cache=True)
    scheduler = engine.scheduler
    one = spec("a", 5, 4)
    engine.add(one)
    engine.step()
    scheduler.room._preempt_all([scheduler._sequences[one.key]], last_resort=False)
    (plan, events), *_ = stepped(engine)
    assert plan.swap_out == ((0, 0), (1, 1), (2, 2))
    assert plan.slices[0].table.block_ids[:2] == (0, 1), "the full ones never left"
    assert [slot for slot, _ in plan.swap_in] == [2]
    assert Matched(key("a"), 5) in events
    assert scheduler.room.free_slots == 8
    assert pool.counts().held == 0


def test_an_abort_while_it_lies_aside_gives_the_slots_back() -> None:
    engine, pool = swapping(3, 2, swap_slots=4)
    engine.add(spec("old", 1, 5))
    engine.add(spec("young", 1, 3))
    for plan, _ in stepped(engine):
        if plan.swap_out:
            break
    assert engine.scheduler.room.free_slots == 3
    assert engine.abort(key("young"))
    assert engine.scheduler.room.free_slots == 4
    list(stepped(engine))
    assert pool.counts() == BlockCounts(3, 3)


def workload(draw: random.Random, num_blocks: int, block_size: int) -> list[SequenceSpec]:
    """Prompts of one beginning, some asked for twice or thrice at once; each fits the pool alone."""
    begin = [draw.randrange(256) for _ in range(64)]
    limit = min(60, num_blocks * block_size)
    specs = []
    for number in range(draw.randint(3, 7)):
        prompt = draw.randint(1, limit // 2)
        same = draw.randint(0, prompt)
        tokens = begin[:same] + [draw.randrange(256) for _ in range(prompt - same)]
        one = spec(f"r{number}", tokens, draw.randint(1, limit - prompt), Sampling(1.0, seed=number))
        specs.append(replace(one, n=draw.choice([1, 1, 2, 3])))
    return specs


@pytest.mark.parametrize("batch", range(4))
def test_tickets_that_take_every_free_block_while_a_step_runs_spoil_no_move(batch: int) -> None:
    """Between schedule and apply, writers of other machines write into all that a ticket could reserve: what a copy
    or a swap still reads is not among it. Everything said stays exact."""
    seen: Counter[str] = Counter()
    for seed in range(batch * 30, batch * 30 + 30):
        draw = random.Random(f"tickets {seed}")
        num_blocks, block_size = draw.randint(6, 30), draw.choice([1, 2, 4])
        engine, pool = swapping(num_blocks, block_size, swap_slots=draw.choice([4, 40]), cache=draw.random() < 0.7)
        scheduler, executor = engine.scheduler, engine.executor
        assert isinstance(executor, HashExecutor)
        specs = workload(draw, num_blocks, block_size)
        said: dict[SequenceKey, list[int]] = {}
        for one in specs:
            scheduler.add(one)
        epoch = 0
        while scheduler.has_work:
            plan = scheduler.schedule()
            if plan is None:
                assert not scheduler.has_work
                break
            epoch += 1
            reserved = pool.reserve(pool.num_free, epoch)
            assert reserved is not None
            for block_id in reserved:
                executor.pool.write(block_id, 0, draw.randbytes(executor.layout.block_bytes))
            pool.check_integrity()
            result = executor.run(plan)
            for block_id in reserved:
                executor.pool.write(block_id, 0, draw.randbytes(executor.layout.block_bytes))
            for event in scheduler.apply(plan, result):
                if isinstance(event, Sampled):
                    said.setdefault(event.key, []).append(event.token_id)
            pool.free_reserved(reserved, epoch)
            pool.check_integrity()
            moves = {"out": plan.swap_out, "in": plan.swap_in, "copies": plan.copies}
            seen.update({name: len(of_kind) for name, of_kind in moves.items()})
        reference, _ = hash_engine(128, block_size)
        for one in specs:
            for sequence in sequences_of(one):
                assert tuple(said[sequence.key]) == reference.generate([sequence])[sequence.key], f"seed {seed}"
        assert pool.counts().held == 0
        executor.close()
        reference.executor.close()
    assert min(seen["out"], seen["in"], seen["copies"]) > 10, f"hardly anything was moved: {seen}"
