"""A gap's causes: they add up to it, whatever was recorded, and what made it long is named first."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.gaps import CAUSES, Cause, StepLog, StepRecord, TokenPoint, accumulate_stream, gap_of, split

LATENCY_S = 0.0005
"""From the end of a step to the token's arrival."""
CLOCKS_S = 500.0
"""The coordinator's clock minus the worker's: no split may need it."""


def steps_of(count: int = 40, **special: StepRecord) -> tuple[StepLog, list[StepRecord]]:
    """Steps of 10 ms + 1 ms a sequence + 0.2 ms a prompt token, one after the other; special: s12=fields of step 12."""
    log, records, at = StepLog(), [], 100.0
    for step_id in range(1, count + 1):
        batch = 1 + step_id % 4
        record = StepRecord(step_id, at, 0.0002, 0.0003, 0.010 + 0.001 * batch, 0.0004, 0.0001, batch, 0, batch)
        change = special.get(f"s{step_id}")
        if change is not None:
            record = change._replace(step_id=step_id, start_s=at + change.start_s)
        at = record.end_s + 0.0001
        log.add(record)
        records.append(record)
    return log, records


def plain(forward_s: float, **changes: float) -> StepRecord:
    """A step of two sequences; start_s: how much later than it could."""
    base = StepRecord(0, 0.0, 0.0002, 0.0003, forward_s, 0.0004, 0.0001, 2, 0, 2)
    return base._replace(**changes)  # type: ignore[arg-type]  # fields by name


def token(record: StepRecord | None, late_s: float = 0.0, write_s: float = 0.0001, attempt: int = 0) -> TokenPoint:
    assert record is not None
    arrived = record.end_s + CLOCKS_S + LATENCY_S + late_s
    return TokenPoint(arrived, arrived + write_s, attempt, record)


def first_of(causes: dict[Cause, float]) -> Cause:
    return max(causes, key=causes.__getitem__)


def checked(
    previous: TokenPoint, current: TokenPoint, log: StepLog | None, exposed_s: float = 0.0
) -> dict[Cause, float]:
    causes = split(previous, current, log, exposed_s)
    assert sum(causes.values()) == pytest.approx(gap_of(previous, current), abs=1e-9)
    assert min(causes.values(), default=0.0) >= 0.0
    return causes


def test_a_plain_gap_is_what_one_sequence_costs_what_the_batch_adds_and_a_little_around_it() -> None:
    log, steps = steps_of()
    causes = checked(token(steps[30]), token(steps[31]), log)  # step 32: one sequence
    assert causes[Cause.BASE_COMPUTE] == pytest.approx(0.0113, rel=0.02)
    assert Cause.BATCH_GROWTH not in causes or causes[Cause.BATCH_GROWTH] < 1e-4
    causes = checked(token(steps[33]), token(steps[34]), log)  # step 35: four
    assert causes[Cause.BATCH_GROWTH] == pytest.approx(0.003, rel=0.05)
    assert causes[Cause.SAMPLING] == pytest.approx(0.0004, rel=0.05)
    assert Cause.UNEXPLAINED not in causes


def test_prompt_tokens_in_the_step_are_named_first_with_what_they_took_also_the_first_time() -> None:
    log, steps = steps_of(s20=plain(0.012 + 0.1, prefill_tokens=512, num_tokens=514))
    causes = checked(token(steps[18]), token(steps[19]), log)
    assert first_of(causes) is Cause.PREFILL_IN_STEP
    assert causes[Cause.PREFILL_IN_STEP] == pytest.approx(0.1, rel=0.1)


def test_a_forward_pass_that_no_batch_explains_was_held_up() -> None:
    log, steps = steps_of(s20=plain(0.012 + 0.5))
    causes = checked(token(steps[18]), token(steps[19]), log)
    assert first_of(causes) is Cause.HOST_STALL
    assert causes[Cause.HOST_STALL] == pytest.approx(0.5, rel=0.1)


@pytest.mark.parametrize("phase", ["schedule_s", "build_s", "sample_s", "send_s"])
def test_so_was_any_other_phase_that_takes_far_longer_than_usual(phase: str) -> None:
    log, steps = steps_of(s20=plain(0.012, **{phase: 0.3}))
    causes = checked(token(steps[18]), token(steps[19]), log)
    assert first_of(causes) is Cause.HOST_STALL
    assert causes[Cause.HOST_STALL] == pytest.approx(0.3, rel=0.1)


def test_a_worker_that_computes_nothing_between_two_steps_was_held_up() -> None:
    log, steps = steps_of(s20=plain(0.012, start_s=0.4))
    causes = checked(token(steps[18]), token(steps[19]), log)
    assert causes[Cause.HOST_STALL] == pytest.approx(0.4, rel=0.1)


def test_steps_without_the_sequence_are_a_preemption_if_there_was_one_and_else_a_wait() -> None:
    log, steps = steps_of()
    causes = checked(token(steps[10]), token(steps[16]), log)
    others = sum(step.duration_s for step in steps[11:16])
    assert first_of(causes) is Cause.SCHEDULE_WAIT
    assert causes[Cause.SCHEDULE_WAIT] == pytest.approx(others, rel=0.1)
    log, steps = steps_of(s12=plain(0.012, preemptions=1), s17=plain(0.012 + 0.04, prefill_tokens=200))
    causes = checked(token(steps[10]), token(steps[16]), log)
    assert first_of(causes) is Cause.SWAP_OR_PREEMPTION
    assert Cause.PREFILL_IN_STEP not in causes  # its own tokens, computed once more


def test_a_token_that_was_long_on_its_way_is_delivery_and_what_followed_it_sooner_is_not_stretched() -> None:
    log, steps = steps_of()
    causes = checked(token(steps[18]), token(steps[19], late_s=0.2), log)
    assert first_of(causes) is Cause.DELIVERY
    assert causes[Cause.DELIVERY] == pytest.approx(0.2, rel=0.1)
    causes = checked(token(steps[19], late_s=0.008), token(steps[20]), log)
    assert Cause.DELIVERY not in causes or causes[Cause.DELIVERY] < 0.001


def test_a_write_that_takes_long_is_the_readers_also_for_tokens_that_waited_behind_it() -> None:
    log, steps = steps_of()
    causes = checked(token(steps[18]), token(steps[19], write_s=0.3), log)
    assert first_of(causes) is Cause.SLOW_READER
    assert causes[Cause.SLOW_READER] == pytest.approx(0.3, rel=0.1)
    behind = token(steps[20], write_s=0.4)
    causes = checked(token(steps[19], write_s=0.3), behind, log)
    assert set(causes) == {Cause.SLOW_READER, Cause.DELIVERY}


def test_a_gap_between_two_attempts_is_the_move_but_for_the_new_ones_own_step() -> None:
    log, steps = steps_of()
    before = TokenPoint(601.0, 601.0, 0, steps[3])
    causes = checked(before, TokenPoint(602.0, 602.0001, 1, None), log)
    assert first_of(causes) is Cause.MIGRATION
    assert causes[Cause.MIGRATION] == pytest.approx(1.0)
    causes = checked(before, TokenPoint(602.0, 602.0001, 1, steps[5]), log)
    assert causes[Cause.MIGRATION] == pytest.approx(1.0 - steps[5].duration_s, rel=0.01)


def test_the_first_gap_of_decode_waits_for_blocks_for_the_step_under_way_and_for_its_own() -> None:
    log, steps = steps_of()
    own = token(steps[20])
    first = TokenPoint(own.arrived_s - 0.3, own.arrived_s - 0.2999)
    causes = checked(first, own, log, exposed_s=0.25)
    assert first_of(causes) is Cause.KV_WAIT
    assert causes[Cause.KV_WAIT] == pytest.approx(0.25)
    assert causes[Cause.SCHEDULE_WAIT] == pytest.approx(steps[19].duration_s, rel=0.2)


def test_what_nothing_is_known_of_is_unexplained_and_nothing_else_is() -> None:
    log, steps = steps_of()
    before = token(steps[18])
    after = TokenPoint(before.sent_s + 0.1, before.sent_s + 0.1)
    assert checked(before, after, log) == {Cause.UNEXPLAINED: pytest.approx(0.1)}
    assert checked(before, after, None) == {Cause.UNEXPLAINED: pytest.approx(0.1)}


def test_before_eight_steps_a_pass_is_all_base() -> None:
    log, steps = steps_of(7)
    causes = checked(token(steps[2]), token(steps[3]), log)
    assert causes[Cause.BASE_COMPUTE] == pytest.approx(steps[3].forward_s + steps[3].build_s, rel=0.01)
    assert not {Cause.BATCH_GROWTH, Cause.PREFILL_IN_STEP, Cause.HOST_STALL} & set(causes)


SECONDS = st.floats(0, 3)
RECORDS = st.builds(
    StepRecord,
    step_id=st.integers(1, 30),
    start_s=st.floats(0, 10),
    schedule_s=SECONDS,
    build_s=SECONDS,
    forward_s=SECONDS,
    sample_s=SECONDS,
    send_s=SECONDS,
    batch=st.integers(0, 40),
    prefill_tokens=st.integers(0, 500),
    preemptions=st.integers(0, 1),
    swapped_blocks=st.integers(0, 1),
)
LOGS = st.lists(RECORDS, max_size=20, unique_by=lambda record: record.step_id)


@st.composite
def streams(draw: st.DrawFn) -> tuple[StepLog, list[TokenPoint]]:
    """Any tokens of any of these steps, or of none; one step in three was never heard of."""
    records, log = draw(LOGS), StepLog()
    for record in records:
        if record.step_id % 3:
            log.add(record)
    made_by = st.sampled_from([None, *records])
    points = st.builds(
        lambda at, lag, attempt, step: TokenPoint(at, at + lag, attempt, step),
        st.floats(0, 20),
        SECONDS,
        st.integers(0, 1),
        made_by,
    )
    return log, draw(st.lists(points, min_size=2, max_size=12))


@settings(max_examples=100, deadline=None)
@given(streams(), st.booleans(), SECONDS)
def test_whatever_was_recorded_causes_add_up_to_the_gap(
    stream: tuple[StepLog, list[TokenPoint]], known: bool, exposed_s: float
) -> None:
    log, points = stream
    for previous, current in itertools.pairwise(points):
        checked(previous, current, log if known else None, exposed_s)


@settings(max_examples=100, deadline=None)
@given(streams(), SECONDS)
def test_a_whole_streams_causes_add_up_to_its_gaps(stream: tuple[StepLog, list[TokenPoint]], exposed_s: float) -> None:
    log, points = stream
    sent = sorted(point.sent_s for point in points)
    out = [0.0] * len(CAUSES)
    accumulate_stream(out, [p.arrived_s for p in points], sent, [p.step for p in points], log, exposed_s)
    assert min(out) >= 0.0
    assert sum(out) == pytest.approx(sent[-1] - sent[0], abs=1e-9)


def test_of_a_stream_the_same_is_said_as_of_its_gaps_one_by_one() -> None:
    log, steps = steps_of(s20=plain(0.512), s30=plain(0.112, prefill_tokens=512))
    points = [token(step) for step in steps]
    singly = dict.fromkeys(CAUSES, 0.0)
    for previous, current in itertools.pairwise(points):
        for cause, seconds in split(previous, current, log).items():
            singly[cause] += seconds
    out = [0.0] * len(CAUSES)
    accumulate_stream(out, [p.arrived_s for p in points], [p.sent_s for p in points], steps, log)
    assert dict(zip(CAUSES, out, strict=True)) == pytest.approx(singly, abs=0.01)
