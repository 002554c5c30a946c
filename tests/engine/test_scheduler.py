"""Blocks running out, aborts at any moment, and order: who waits, who passes, who gives way."""

from __future__ import annotations

import pytest
from specs import constant, hash_engine, key, rows, spec, steps

from engine.block_pool import BlockPool
from engine.budgets import Budgets
from engine.events import Finished, Preempted, Sampled
from engine.planner import MAX_PASSES
from engine.queues import MAX_PREEMPTIONS, Queues
from engine.scheduler import Scheduler
from engine.sequence import SequenceState
from kvrelay.blocks import BlockCounts


def one_step(scheduler: Scheduler) -> tuple[list[tuple[str, int, int]], list[str]]:
    """Rows of the next step, and who was preempted."""
    plan = scheduler.schedule()
    assert plan is not None
    events = scheduler.apply(plan, constant(plan))
    return rows(plan), [e.key.request_id for e in events if isinstance(e, Preempted)]


def test_out_of_blocks_the_youngest_gives_way_and_goes_on_where_it_was() -> None:
    pool = BlockPool(3)
    scheduler = Scheduler(pool, 4, Budgets())
    scheduler.add(spec("old", 3, 6))
    scheduler.add(spec("young", 3, 4))
    assert one_step(scheduler) == ([("old", 0, 3), ("young", 0, 3)], [])
    assert one_step(scheduler) == ([("old", 3, 1), ("young", 3, 1)], [])
    # Each needs a second block and one is left: old takes it, young must wait, and keeps its own meanwhile.
    assert one_step(scheduler) == ([("old", 4, 1)], [])
    assert [one_step(scheduler) for _ in range(2)] == [([("old", 5, 1)], []), ([("old", 6, 1)], [])]
    assert scheduler.num_running == 2
    planned = [one_step(scheduler) for _ in range(2)]
    assert planned == [([("old", 7, 1)], []), ([("young", 4, 1)], [])]


def test_the_preempted_sequence_is_computed_again_and_its_indexes_go_on() -> None:
    pool = BlockPool(3)
    scheduler = Scheduler(pool, 2, Budgets())
    scheduler.add(spec("old", 1, 5))
    scheduler.add(spec("young", 1, 3))
    seen = [
        (rows(plan), [e for e in events if isinstance(e, (Sampled, Preempted))]) for plan, events in steps(scheduler)
    ]
    assert [r for r, _ in seen] == [
        [("old", 0, 1), ("young", 0, 1)],
        [("old", 1, 1), ("young", 1, 1)],
        [("old", 2, 1)],
        [("old", 3, 1)],
        [("old", 4, 1)],
        [("young", 0, 3)],
    ]
    assert seen[4][1] == [Preempted(key("young"), 2), Sampled(key("old"), 4, 9)]
    assert [e.index for _, events in seen for e in events if isinstance(e, Sampled) and e.key == key("young")] == [
        0,
        1,
        2,
    ]
    assert pool.counts() == BlockCounts(3, 3)


def test_no_more_are_preempted_than_needed_and_blocks_still_pushed_from_do_not_count() -> None:
    pool = BlockPool(8)
    scheduler = Scheduler(pool, 2, Budgets())
    for name in ("a", "b", "c", "d"):
        scheduler.add(spec(name, 3, 8))
    one_step(scheduler)
    pushed = (6, 7)  # the blocks of d, the youngest
    pool.retain(pushed)
    assert one_step(scheduler) == ([("a", 3, 1), ("b", 3, 1), ("c", 3, 1), ("d", 3, 1)], [])
    # a needs a third block: preempting d would free nothing, so c gives way, and frees enough for b too.
    assert one_step(scheduler) == ([("a", 4, 1), ("b", 4, 1)], ["c"])
    pool.release(pushed)
    assert [e for _, es in steps(scheduler) for e in es if isinstance(e, Finished)] != []
    assert pool.num_free == 8


def test_when_preempting_would_not_suffice_nobody_is_preempted() -> None:
    pool = BlockPool(4)
    scheduler = Scheduler(pool, 2, Budgets())
    scheduler.add(spec("a", 1, 7))
    scheduler.add(spec("b", 1, 3))
    one_step(scheduler)
    pool.retain((1,))  # of b
    tickets = pool.reserve(2, epoch=1)
    assert tickets == (2, 3)
    one_step(scheduler)
    assert scheduler.schedule() is None
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 0)
    pool.free_reserved(tickets, 1)
    assert one_step(scheduler) == ([("a", 2, 1), ("b", 2, 1)], [])


def test_a_prompt_is_admitted_only_when_its_whole_length_and_one_more_fit() -> None:
    pool = BlockPool(4)
    scheduler = Scheduler(pool, 4, Budgets(max_tokens=4))
    scheduler.add(spec("a", 8, 5))
    scheduler.add(spec("b", 4, 2))
    # One block of a is taken and two are promised to it: the one left is not enough for b's 4 + 1 tokens.
    assert one_step(scheduler)[0] == [("a", 0, 4)]
    assert (pool.num_free, scheduler.num_running, scheduler.num_waiting) == (3, 1, 1)
    assert [r for plan, _ in steps(scheduler) for r in rows(plan) if r[0] == "b"] == [("b", 0, 4), ("b", 4, 1)]


def test_a_younger_decode_does_not_take_the_block_promised_to_an_older_prompt() -> None:
    pool = BlockPool(4)
    scheduler = Scheduler(pool, 4, Budgets(max_tokens=6))
    scheduler.add(spec("prompt", 11, 1))
    blocks = pool.allocate(1)
    assert blocks is not None
    scheduler.add(spec("decode", 3, 3, output=(5,)), block_ids=blocks, num_computed=3)
    assert one_step(scheduler) == ([("decode", 3, 1), ("prompt", 0, 5)], [])
    assert pool.num_free == 1
    assert one_step(scheduler) == ([("prompt", 5, 6)], [])
    assert one_step(scheduler) == ([("decode", 4, 1)], [])


def test_a_sequence_preempted_often_is_spared_unless_nothing_could_run_otherwise() -> None:
    queues = Queues()
    old, tired, young = (SequenceState(spec(n, 3, 3), i, (i,), 0, 4) for i, n in enumerate(("old", "tired", "young")))
    for seq in (old, tired, young):
        queues.run(seq, promised=0)
    tired.preemptions = MAX_PREEMPTIONS
    assert list(queues.victims(old, last_resort=False)) == [young]
    assert list(queues.victims(old, last_resort=True)) == [young, tired]
    young.planned = True
    assert list(queues.victims(old, last_resort=False)) == []


def test_two_prompts_of_most_of_the_pool_do_not_throw_each_other_out() -> None:
    pool = BlockPool(100)
    scheduler = Scheduler(pool, 16, Budgets(max_tokens=64))
    for name in ("a", "b"):
        scheduler.add(spec(name, 960, 200))
    computed = preemptions = 0
    for plan, events in steps(scheduler):
        computed += plan.num_tokens
        preemptions += sum(isinstance(e, Preempted) for e in events)
    assert (computed, preemptions) == (2 * (960 + 199), 0)


def test_small_prompts_pass_a_big_one_for_a_bounded_time_and_then_it_runs() -> None:
    pool = BlockPool(100)
    scheduler = Scheduler(pool, 16, Budgets())
    scheduler.add(spec("first", 280, 40))
    one_step(scheduler)
    scheduler.add(spec("big", 90 * 16 - 1, 1))
    started: dict[str, int] = {}
    for step in range(200):
        scheduler.add(spec(f"small{step}", 17, 30))
        for name, start, _ in one_step(scheduler)[0]:
            if start == 0:
                started.setdefault(name, step)
        if "big" in started:
            break
    assert started["small0"] == 0
    assert sum(name.startswith("small") for name in started) == MAX_PASSES
    # It fits once no more than 10 blocks are in use: three of the 16 small ones, of 3 blocks each, are left then.
    assert started["big"] == 42


def test_a_long_prompt_that_runs_does_not_keep_short_ones_from_rows_and_blocks_left() -> None:
    scheduler = Scheduler(BlockPool(100), 16, Budgets(max_tokens=64))
    scheduler.add(spec("d", 1, 10))
    one_step(scheduler)
    scheduler.add(spec("long", 640, 1))
    scheduler.add(spec("short", 5, 1))
    assert one_step(scheduler)[0] == [("d", 1, 1), ("long", 0, 63)]


def test_sequences_handed_over_run_as_soon_as_a_row_is_free_whatever_waits() -> None:
    pool = BlockPool(6)
    scheduler = Scheduler(pool, 4, Budgets(max_sequences=1))
    scheduler.add(spec("big", 21, 1))
    blocks = pool.allocate(2)
    assert blocks is not None
    scheduler.add(spec("landed", 4, 3, output=(5,)), block_ids=blocks, num_computed=4)
    assert [rows(plan)[0] for plan, _ in steps(scheduler)] == [("landed", 4, 1), ("landed", 5, 1), ("big", 0, 21)]


def test_waiting_sequences_that_hold_blocks_give_them_up_before_everything_stands_still() -> None:
    pool = BlockPool(4)
    scheduler = Scheduler(pool, 4, Budgets())
    for name in ("a", "b"):
        blocks = pool.allocate(2)
        assert blocks is not None
        scheduler.add(spec(name, 13, 1), block_ids=blocks, num_computed=8)
    assert one_step(scheduler) == ([("a", 8, 5)], ["b"])
    assert one_step(scheduler) == ([("b", 0, 13)], [])
    assert scheduler.schedule() is None
    assert pool.num_free == 4


def test_nothing_runs_while_tickets_hold_the_blocks_and_it_starts_when_they_come_back() -> None:
    pool = BlockPool(4)
    scheduler = Scheduler(pool, 4, Budgets())
    tickets = pool.reserve(3, epoch=1)
    assert tickets is not None
    scheduler.add(spec("a", 5, 1))
    assert scheduler.schedule() is None
    pool.free_reserved(tickets, 1)
    assert one_step(scheduler)[0] == [("a", 0, 5)]


def test_spare_blocks_leave_what_was_promised_and_one_for_each_that_runs() -> None:
    pool = BlockPool(20)
    scheduler = Scheduler(pool, 4, Budgets(max_tokens=8))
    assert scheduler.spare_blocks == 20
    scheduler.add(spec("a", 19, 5))
    assert scheduler.spare_blocks == 15
    one_step(scheduler)
    assert (pool.num_free, scheduler.spare_blocks) == (18, 14)
    scheduler.add(spec("b", 60, 1))
    assert scheduler.spare_blocks == 0


def test_a_sequence_that_can_never_fit_is_not_accepted() -> None:
    scheduler = Scheduler(BlockPool(4), 4, Budgets())
    assert scheduler.fits_alone(spec("just", 10, 7))
    assert not scheduler.fits_alone(spec("over", 10, 8))
    with pytest.raises(AssertionError, match="can never fit a pool of 4 blocks"):
        scheduler.add(spec("over", 10, 8))
    scheduler.add(spec("just", 10, 7))
    assert sum(isinstance(e, Sampled) for _, events in steps(scheduler) for e in events) == 7


def test_one_key_names_one_sequence() -> None:
    scheduler = Scheduler(BlockPool(4), 4, Budgets())
    scheduler.add(spec("a", 3, 3))
    with pytest.raises(AssertionError, match="is already here"):
        scheduler.add(spec("a", 3, 3))


def test_queued_tokens_count_what_has_yet_to_be_computed() -> None:
    scheduler = Scheduler(BlockPool(40), 4, Budgets(max_tokens=10))
    assert (scheduler.queued_tokens, scheduler.has_work) == (0, False)
    scheduler.add(spec("a", 15, 2))
    scheduler.add(spec("b", 7, 2))
    assert scheduler.queued_tokens == 22
    one_step(scheduler)
    assert scheduler.queued_tokens == 12
    one_step(scheduler)
    assert scheduler.queued_tokens == 2 + 1
    scheduler.abort(key("b"))
    assert scheduler.queued_tokens == 1


def test_aborting_what_is_not_here_is_no_error() -> None:
    assert Scheduler(BlockPool(4), 4, Budgets()).abort(key("nobody")) is False


def test_an_abort_while_waiting_or_between_steps_frees_the_blocks_at_once() -> None:
    pool = BlockPool(4)
    scheduler = Scheduler(pool, 4, Budgets(max_tokens=4))
    scheduler.add(spec("a", 8, 4))
    scheduler.add(spec("b", 8, 4))
    one_step(scheduler)
    assert (pool.num_free, scheduler.num_running, scheduler.num_waiting) == (3, 1, 1)
    assert scheduler.abort(key("b"))
    assert scheduler.abort(key("a"))
    assert not scheduler.abort(key("a"))
    assert (pool.num_free, scheduler.num_running, scheduler.num_waiting, scheduler.has_work) == (4, 0, 0, False)


def test_an_abort_in_flight_frees_blocks_only_at_apply_and_drops_only_its_own_rows() -> None:
    pool = BlockPool(4)
    scheduler = Scheduler(pool, 4, Budgets())
    scheduler.add(spec("a", 3, 4))
    scheduler.add(spec("b", 3, 1))
    plan = scheduler.schedule()
    assert plan is not None
    assert scheduler.abort(key("a"))
    assert not scheduler.abort(key("a"))
    assert pool.num_free == 2, "the step in flight still writes to the block of a"
    scheduler.add(spec("a", 3, 1))
    events = scheduler.apply(plan, constant(plan))
    assert [e.key.request_id for e in events] == ["b", "b", "b"]
    assert pool.num_free == 3
    assert [rows(p) for p, _ in steps(scheduler)] == [[("a", 0, 3)]]
    assert pool.num_free == 4


def test_an_abort_at_any_moment_of_any_sequence_leaves_no_block_and_no_neighbour_harmed() -> None:
    names = ("a", "bb", "ccc")
    specs = [spec(name, 9 + 4 * i, 7) for i, name in enumerate(names)]
    expected = hash_engine(64, 4)[0].generate(specs)
    for moment in range(16):
        for victim in names:
            engine, pool = hash_engine(9, 4, Budgets(max_tokens=8))
            tokens: dict[str, list[int]] = {name: [] for name in names}
            for sequence in specs:
                engine.add(sequence)
            for half_step in range(200):
                in_flight = half_step % 2 == 1
                if half_step == moment and not in_flight:
                    engine.abort(key(victim))
                if not in_flight:
                    plan = engine.scheduler.schedule()
                    if plan is None:
                        break
                    result = engine.executor.run(plan)
                    continue
                assert plan is not None
                if half_step == moment:
                    engine.abort(key(victim))
                for event in engine.scheduler.apply(plan, result):
                    if isinstance(event, Sampled):
                        tokens[event.key.request_id].append(event.token_id)
                pool.check_integrity()
            assert pool.num_free == 9
            for name in names:
                assert tuple(tokens[name]) == expected[key(name)][: len(tokens[name])]
                assert name == victim or len(tokens[name]) == 7
