"""Plans as values: what a step computes, slice by slice. Worked figures are reproduced exactly."""

from __future__ import annotations

import pytest
from specs import GREEDY, constant, key, rows, spec, steps

from engine.block_pool import BlockPool
from engine.budgets import Budgets
from engine.events import Computed, Finished, Sampled
from engine.plan import Plan, Result, SequenceSlice
from engine.scheduler import Scheduler
from kvrelay.blocks import BlockTable
from kvrelay.requests import FinishReason

STEPS_NEEDED = {"A": 2, "B": 5, "C": 3, "D": 8, "E": 4, "F": 3, "G": 5, "H": 6}


def handed_over(scheduler: Scheduler, pool: BlockPool, name: str, num_computed: int, max_tokens: int) -> None:
    blocks = pool.allocate(num_computed // 16 + 1)
    assert blocks is not None
    scheduler.add(spec(name, num_computed, max_tokens, output=(3,)), block_ids=blocks, num_computed=num_computed)


def test_continuous_batching_of_eight_requests_on_four_rows_takes_12_steps_and_starts_e_at_step_3() -> None:
    scheduler = Scheduler(BlockPool(64), 16, Budgets(max_sequences=4))
    for name, needed in STEPS_NEEDED.items():
        scheduler.add(spec(name, 1, needed))
    plans = [plan for plan, _ in steps(scheduler)]
    useful = sum(plan.num_samples for plan in plans)
    assert (len(plans), useful) == (12, 36)
    assert useful / (4 * len(plans)) == 0.75
    first_step = {name: next(p.step_id for p in plans if name in str(rows(p))) for name in STEPS_NEEDED}
    assert first_step == {"A": 1, "B": 1, "C": 1, "D": 1, "E": 3, "F": 4, "G": 6, "H": 7}


def test_static_batching_of_the_same_requests_would_take_14_steps_and_start_e_at_step_9() -> None:
    needed = list(STEPS_NEEDED.values())
    batches = [needed[:4], needed[4:]]
    num_steps = sum(max(batch) for batch in batches)
    assert (num_steps, max(batches[0]) + 1) == (14, 9)
    assert round(100 * sum(needed) / (4 * num_steps)) == 64


def test_selective_batching_puts_7_rows_of_three_sequences_into_one_step_and_samples_3() -> None:
    pool = BlockPool(8)
    scheduler = Scheduler(pool, 16, Budgets())
    scheduler.add(spec("R1", (10, 11, 12, 13, 14), 4))
    handed_over(scheduler, pool, "R2", num_computed=7, max_tokens=4)
    handed_over(scheduler, pool, "R3", num_computed=3, max_tokens=4)
    plan = scheduler.schedule()
    assert plan == Plan(
        step_id=1,
        slices=(
            SequenceSlice(key("R2"), (3,), 7, BlockTable(0, 16, (0,), 8), True, 1, GREEDY),
            SequenceSlice(key("R3"), (3,), 3, BlockTable(0, 16, (1,), 4), True, 1, GREEDY),
            SequenceSlice(key("R1"), (10, 11, 12, 13, 14), 0, BlockTable(0, 16, (2,), 5), True, 0, GREEDY),
        ),
    )
    assert (plan.num_tokens, plan.num_samples) == (7, 3)
    assert [s.context_len for s in plan.slices] == [8, 4, 5]


@pytest.mark.parametrize(("decodes", "chunk", "num_steps"), [(0, 2048, 16), (32, 2016, 17)])
def test_a_32768_token_prompt_takes_16_steps_and_beside_32_decodes_chunks_of_2016_and_17_steps(
    decodes: int, chunk: int, num_steps: int
) -> None:
    pool = BlockPool(4096)
    scheduler = Scheduler(pool, 16, Budgets(max_tokens=2048))
    for number in range(decodes):
        handed_over(scheduler, pool, f"D{number}", num_computed=100, max_tokens=1000)
    scheduler.add(spec("long", 32_768, 1))
    chunks, samples = [], []
    for plan, _ in steps(scheduler):
        assert len(plan.slices) == decodes + 1
        assert all(len(s.token_ids) == 1 for s in plan.slices[:-1])
        chunks.append(len(plan.slices[-1].token_ids))
        samples.append(plan.slices[-1].samples)
        if samples[-1]:
            break
    assert chunks == [chunk] * (32_768 // chunk) + [32_768 % chunk] * (32_768 % chunk > 0)
    assert samples == [False] * (num_steps - 1) + [True]


def test_short_prompts_are_packed_to_fill_the_token_budget_and_the_last_is_split() -> None:
    scheduler = Scheduler(BlockPool(16), 16, Budgets(max_tokens=20))
    for name in "abc":
        scheduler.add(spec(name, 9, 2))
    planned = [rows(plan) for plan, _ in steps(scheduler)]
    assert planned == [
        [("a", 0, 9), ("b", 0, 9), ("c", 0, 2)],
        [("a", 9, 1), ("b", 9, 1), ("c", 2, 7)],
        [("c", 9, 1)],
    ]


def test_prompt_rows_are_capped_only_in_steps_that_decode_too() -> None:
    pool = BlockPool(16)
    scheduler = Scheduler(pool, 16, Budgets(max_tokens=64, max_prefill_tokens=4))
    handed_over(scheduler, pool, "d", num_computed=5, max_tokens=3)
    scheduler.add(spec("p", 40, 1))
    planned = [rows(plan) for plan, _ in steps(scheduler)]
    assert planned == [[("d", 5, 1), ("p", 0, 4)], [("d", 6, 1), ("p", 4, 4)], [("p", 8, 32)]]


def test_a_chunked_prompt_takes_blocks_as_it_goes_and_reports_tables_of_what_is_computed() -> None:
    pool = BlockPool(4)
    scheduler = Scheduler(pool, 4, Budgets(max_tokens=6))
    scheduler.add(spec("p", 13, max_tokens=1))
    seen = [(pool.num_free, *events) for _, events in steps(scheduler)]
    assert seen == [
        (2, Computed(key("p"), 6, BlockTable(0, 4, (0, 1), 6))),
        (1, Computed(key("p"), 12, BlockTable(0, 4, (0, 1, 2), 12))),
        (
            0,
            Computed(key("p"), 13, BlockTable(0, 4, (0, 1, 2, 3), 13)),
            Sampled(key("p"), 0, 9),
            Finished(key("p"), FinishReason.LENGTH, 1),
        ),
    ]
    assert pool.num_free == 4


def test_who_pushes_from_the_blocks_of_a_prompt_can_retain_them_after_the_step_that_ends_it() -> None:
    pool = BlockPool(4)
    scheduler = Scheduler(pool, 4, Budgets())
    scheduler.add(spec("p", 7, max_tokens=1))
    plan = scheduler.schedule()
    assert plan is not None
    computed, _, finished = scheduler.apply(plan, constant(plan))
    assert isinstance(computed, Computed)
    assert isinstance(finished, Finished)
    pool.retain(computed.table.block_ids)
    assert scheduler.has_work
    assert scheduler.schedule() is None
    assert not scheduler.has_work
    assert (pool.num_free, [pool.references(i) for i in (0, 1)]) == (2, [1, 1])
    pool.release(computed.table.block_ids)
    assert pool.num_free == 4


def test_a_sequence_handed_over_only_decodes_and_reports_no_prompt_chunk() -> None:
    pool = BlockPool(4)
    scheduler = Scheduler(pool, 16, Budgets())
    handed_over(scheduler, pool, "d", num_computed=15, max_tokens=3)
    assert [(rows(plan), events) for plan, events in steps(scheduler)] == [
        ([("d", 15, 1)], (Sampled(key("d"), 1, 9),)),
        ([("d", 16, 1)], (Sampled(key("d"), 2, 9), Finished(key("d"), FinishReason.LENGTH, 3))),
    ]
    assert pool.num_free == 4


def test_a_sequence_moved_here_goes_on_at_its_index_and_counts_from_index_0() -> None:
    scheduler = Scheduler(BlockPool(4), 16, Budgets())
    scheduler.add(spec("m", 10, max_tokens=5, output=(1, 2, 3)))
    events = [e for _, step in steps(scheduler) for e in step if not isinstance(e, Computed)]
    assert events == [Sampled(key("m"), 3, 9), Sampled(key("m"), 4, 9), Finished(key("m"), FinishReason.LENGTH, 5)]


def test_the_table_of_a_decoding_sequence_keeps_the_very_same_ids_until_it_grows() -> None:
    scheduler = Scheduler(BlockPool(4), 4, Budgets())
    scheduler.add(spec("d", 2, 6))
    tables = [plan.slices[0].table for plan, _ in steps(scheduler)]
    assert [t.num_tokens for t in tables] == [2, 3, 4, 5, 6, 7]
    assert tables[0].block_ids is tables[2].block_ids
    assert tables[3].block_ids is tables[5].block_ids == (0, 1)


def test_a_stop_token_ends_a_sequence_and_beats_the_length() -> None:
    scheduler = Scheduler(BlockPool(4), 16, Budgets())
    scheduler.add(spec("s", 3, max_tokens=1, stop=(9,)))
    [(_, events)] = steps(scheduler)
    assert events[1:] == (Sampled(key("s"), 0, 9), Finished(key("s"), FinishReason.STOP, 1))


def test_no_step_exceeds_its_tokens_or_sequences_and_oldest_go_first_when_decodes_exceed_the_budget() -> None:
    scheduler = Scheduler(BlockPool(64), 16, Budgets(max_tokens=3, max_sequences=5))
    for number in range(8):
        scheduler.add(spec(f"r{number}", 1, 4))
    finished = []
    for plan, events in steps(scheduler):
        assert plan.num_tokens <= 3
        assert scheduler.num_running <= 5
        finished += [e.key.request_id for e in events if isinstance(e, Finished)]
    assert finished == [f"r{number}" for number in range(8)]


def test_a_result_of_another_step_or_length_is_our_own_bug() -> None:
    scheduler = Scheduler(BlockPool(4), 16, Budgets())
    scheduler.add(spec("a", 3, 5))
    plan = scheduler.schedule()
    assert plan is not None
    with pytest.raises(AssertionError, match="step 1 was not applied"):
        scheduler.schedule()
    with pytest.raises(AssertionError, match="0 tokens, want 1"):
        scheduler.apply(plan, Result(plan.step_id, ()))
    scheduler.apply(plan, constant(plan))
    with pytest.raises(AssertionError, match="step 1 is not in flight"):
        scheduler.apply(plan, constant(plan))


@pytest.mark.parametrize("name", ["max_tokens", "max_sequences", "max_prefill_tokens"])
def test_a_budget_of_nothing_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        Budgets(**{name: 0})
