"""Classes of priority in one engine: who is admitted, gets a step's tokens, and gives way. No model behind it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from specs import constant, key, rows, spec, steps

from engine.block_pool import BlockPool
from engine.budgets import Budgets
from engine.events import Finished, Preempted
from engine.scheduler import Scheduler
from engine.sequence import CLASS_TURNS
from kvrelay.requests import Priority, SequenceSpec

BATCH, NORMAL, INTERACTIVE = Priority


def made(name: str, prompt: int, priority: Priority, max_tokens: int = 1) -> SequenceSpec:
    return replace(spec(name, prompt, max_tokens), priority=priority)


def scheduler_of(num_blocks: int, budgets: Budgets, specs: Iterable[SequenceSpec] = ()) -> tuple[Scheduler, BlockPool]:
    """Blocks of 4 tokens."""
    pool = BlockPool(num_blocks)
    scheduler = Scheduler(pool, 4, budgets)
    for one in specs:
        scheduler.add(one)
    return scheduler, pool


def hand_over(scheduler: Scheduler, pool: BlockPool, one: SequenceSpec) -> None:
    """With all but its last token computed."""
    computed = len(one.token_ids) - 1
    blocks = pool.allocate(computed // 4 + 1)
    assert blocks is not None
    scheduler.add(one, block_ids=blocks, num_computed=computed)


def finished(scheduler: Scheduler) -> list[str]:
    """The requests in the order in which they end."""
    return [e.key.request_id for _, events in steps(scheduler) for e in events if isinstance(e, Finished)]


def test_waiting_prompts_are_admitted_by_class_then_by_arrival() -> None:
    order = (("b0", BATCH), ("n0", NORMAL), ("i0", INTERACTIVE), ("b1", BATCH), ("i1", INTERACTIVE), ("n1", NORMAL))
    scheduler, _ = scheduler_of(64, Budgets(8, 1), [made(name, 8, priority) for name, priority in order])
    assert finished(scheduler) == ["i0", "i1", "n0", "n1", "b0", "b1"]


def test_those_handed_over_get_free_rows_by_class_then_by_arrival() -> None:
    scheduler, pool = scheduler_of(64, Budgets(8, 1))
    for name, priority in (("b0", BATCH), ("i0", INTERACTIVE), ("b1", BATCH), ("n0", NORMAL), ("i1", INTERACTIVE)):
        hand_over(scheduler, pool, made(name, 8, priority))
    assert finished(scheduler) == ["i0", "i1", "n0", "b0", "b1"]


@pytest.mark.parametrize(
    ("low", "high", "turns"), [(BATCH, NORMAL, 1), (NORMAL, INTERACTIVE, 1), (BATCH, INTERACTIVE, 2)]
)
def test_one_that_waits_is_passed_by_so_many_of_the_next_class_and_no_more(
    low: Priority, high: Priority, turns: int
) -> None:
    later = [made(f"h{number}", 8, high) for number in range(3 * CLASS_TURNS)]
    scheduler, _ = scheduler_of(1024, Budgets(8, 1), [made("low", 8, low), *later])
    assert finished(scheduler).index("low") == turns * CLASS_TURNS - 1


def test_a_class_alone_keeps_its_order_whatever_it_is() -> None:
    for priority in Priority:
        specs = [made(f"r{number}", 8, priority) for number in range(2 * CLASS_TURNS)]
        scheduler, _ = scheduler_of(1024, Budgets(8, 1), specs)
        assert finished(scheduler) == [f"r{number}" for number in range(2 * CLASS_TURNS)]


def test_a_step_s_tokens_go_to_the_prompt_of_the_higher_class_before_the_next_chunk_of_the_lower() -> None:
    scheduler, _ = scheduler_of(64, Budgets(10), [made("batch", 40, BATCH)])
    plans = [scheduler.schedule()]
    assert plans[0] is not None
    assert rows(plans[0]) == [("batch", 0, 10)]
    scheduler.apply(plans[0], constant(plans[0]))
    scheduler.add(made("normal", 4, NORMAL))
    scheduler.add(made("chat", 13, INTERACTIVE))
    seen = [rows(plan) for plan, _ in steps(scheduler)]
    assert seen == [
        [("chat", 0, 10)],
        [("chat", 10, 3), ("normal", 0, 4), ("batch", 10, 3)],
        [("batch", 13, 10)],
        [("batch", 23, 10)],
        [("batch", 33, 7)],
    ]


def test_of_two_prompts_under_way_the_higher_class_gets_its_chunk_first() -> None:
    scheduler, _ = scheduler_of(64, Budgets(10), [made("b0", 15, BATCH), made("n0", 15, NORMAL)])
    seen = [rows(plan) for plan, _ in steps(scheduler)]
    assert seen == [[("n0", 0, 10)], [("n0", 10, 5), ("b0", 0, 5)], [("b0", 5, 10)]]


def test_a_chunk_under_way_waits_for_so_many_of_the_next_class_and_no_more() -> None:
    scheduler, _ = scheduler_of(1024, Budgets(8), [made("low", 24, BATCH)])
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.apply(plan, constant(plan))
    for number in range(3 * CLASS_TURNS):
        scheduler.add(made(f"h{number}", 8, NORMAL))
    order = [request for plan, _ in steps(scheduler) for request, _, _ in rows(plan)]
    assert [at for at, request in enumerate(order) if request == "low"] == [CLASS_TURNS - 1, CLASS_TURNS]


def test_decodes_short_of_tokens_go_by_class() -> None:
    scheduler, pool = scheduler_of(64, Budgets(2, 8))
    for name, priority in (("b0", BATCH), ("n0", NORMAL), ("i0", INTERACTIVE)):
        hand_over(scheduler, pool, made(name, 8, priority, max_tokens=2))
    plan = scheduler.schedule()
    assert plan is not None
    assert rows(plan) == [("i0", 7, 1), ("n0", 7, 1)]


def test_the_youngest_of_the_lowest_class_gives_way_first() -> None:
    """Four that run fill the pool; each needs a block more in the next step, and whoever came first goes on."""
    scheduler, pool = scheduler_of(8, Budgets(64, 8))
    for name, priority in (("b0", BATCH), ("b1", BATCH), ("n0", NORMAL), ("i0", INTERACTIVE)):
        hand_over(scheduler, pool, made(name, 8, priority, max_tokens=9))
    gave_way: list[str] = []
    ended: list[str] = []
    for _, events in steps(scheduler):
        gave_way += [e.key.request_id for e in events if isinstance(e, Preempted)]
        ended += [e.key.request_id for e in events if isinstance(e, Finished)]
    assert gave_way[:2] == ["b1", "b0"]
    assert "i0" not in gave_way
    assert ended[:2] == ["i0", "n0"]
    assert sorted(ended) == ["b0", "b1", "i0", "n0"]


def test_a_higher_class_never_gives_way_to_a_lower_one_however_old() -> None:
    """The lower one waits, as long as the other one runs."""
    scheduler, pool = scheduler_of(4, Budgets(64, 8))
    hand_over(scheduler, pool, made("old", 7, BATCH, max_tokens=10))
    hand_over(scheduler, pool, made("young", 8, INTERACTIVE, max_tokens=9))
    seen = [(rows(plan), events) for plan, events in steps(scheduler)]
    gave_way = [e.key for _, events in seen for e in events if isinstance(e, Preempted)]
    assert set(gave_way) == {key("old")}
    ended = [e.key.request_id for _, events in seen for e in events if isinstance(e, Finished)]
    assert ended == ["young", "old"]


def test_one_that_waits_for_a_row_with_blocks_is_let_run_instead_of_losing_them_to_a_lower_class() -> None:
    """One row and no free block: the lower class that runs cannot go on without the blocks of the higher one."""
    scheduler, pool = scheduler_of(4, Budgets(64, 1))
    hand_over(scheduler, pool, made("low", 8, BATCH, max_tokens=8))
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.apply(plan, constant(plan))
    hand_over(scheduler, pool, made("high", 8, INTERACTIVE, max_tokens=8))
    seen = [(rows(plan), events) for plan, events in steps(scheduler)]
    gave_way = [e.key.request_id for _, events in seen for e in events if isinstance(e, Preempted)]
    assert gave_way == ["low"]
    assert [e.key.request_id for _, events in seen for e in events if isinstance(e, Finished)] == ["high", "low"]


def test_one_that_gave_way_waits_in_front_of_its_class_and_behind_higher_ones() -> None:
    scheduler, pool = scheduler_of(4, Budgets(64, 8))
    hand_over(scheduler, pool, made("i0", 8, INTERACTIVE, max_tokens=5))
    hand_over(scheduler, pool, made("b0", 8, BATCH, max_tokens=3))
    scheduler.add(made("b1", 12, BATCH))
    scheduler.add(made("n0", 8, NORMAL))
    assert finished(scheduler) == ["i0", "n0", "b0", "b1"]
