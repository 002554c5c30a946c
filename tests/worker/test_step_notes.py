"""What a worker tells of its steps: each once per session that asked, with phases that leave no time out."""

from __future__ import annotations

import pytest
from support.pair import Pair
from support.pair_requests import hash_reference, make_work

from engine.plan import Phases, Plan, Result, SequenceSlice
from kvrelay.blocks import BlockCounts, BlockTable
from kvrelay.requests import RequestId, Sampling, SequenceKey, SessionId
from kvrelay.session import Load, Report, TokenOut
from worker import step_notes
from worker.outbox import Outbox
from worker.step_notes import StepNotes, StepTimes

A, B = SessionId("a"), SessionId("b")
LOAD = Load(BlockCounts(100, 40, held=30, cached=20, reserved=10), transfers_in_flight=3)


def broken(*_: object) -> None:
    raise ValueError("negative increment")


def rows(num_tokens: int, samples: bool, forks: int = 0) -> SequenceSlice:
    key = SequenceKey(A, RequestId("r"), 0, 0)
    table = BlockTable(0, 16, (0,), 16)
    return SequenceSlice(key, (1,) * num_tokens, 0, table, samples, 0, Sampling(), (Sampling(),) * forks)


def step(notes: StepNotes, step_id: int, *slices: SequenceSlice, preempted: int = 0) -> None:
    at = float(step_id)
    notes.note(Plan(step_id, slices), StepTimes(at, at + 0.1, at + 0.5))
    notes.record(LOAD, preempted, at + 0.6)


def test_a_record_has_the_phases_of_its_turn_and_what_the_step_held() -> None:
    notes = StepNotes()
    plan = Plan(5, (rows(1, True), rows(1, True, forks=2), rows(8, False)), swap_out=((1, 2),), swap_in=((3, 4),))
    notes.note(plan, StepTimes(10.0, 10.25, 11.25, Phases(0.25, 0.5, 0.125)))
    notes.record(LOAD, 2, 11.5)
    [record] = notes.ring
    assert record == (5, 10.0, 0.25, 0.375, 0.5, 0.125, 0.25, 4, 8, 10, 40, 3, 2, 2)
    assert record.end_s == 11.5


def test_an_executor_that_measures_nothing_has_computed_all_the_time() -> None:
    notes = StepNotes()
    step(notes, 1, rows(1, True))
    assert notes.ring[0].forward_s == pytest.approx(0.4)
    assert notes.ring[0].build_s == notes.ring[0].sample_s == 0.0


def test_preemptions_are_those_of_the_step() -> None:
    notes = StepNotes()
    for step_id, preempted in enumerate((0, 2, 2, 3), 1):
        step(notes, step_id, preempted=preempted)
    assert [r.preemptions for r in notes.ring] == [0, 2, 0, 1]


def test_each_session_hears_of_each_step_once_from_its_opening_on() -> None:
    notes = StepNotes()
    notes.open(A)
    step(notes, 1)
    notes.open(B)
    step(notes, 2)
    step(notes, 3)
    assert [r.step_id for r in notes.take(A)] == [1, 2, 3]
    assert [r.step_id for r in notes.take(B)] == [2, 3]
    assert notes.take(A) == ()
    step(notes, 4)
    assert [r.step_id for r in notes.take(A)] == [4]
    notes.close(B)
    assert notes.take(B) == ()


def test_a_step_that_cannot_be_recorded_is_not_told_and_the_next_one_is(monkeypatch: pytest.MonkeyPatch) -> None:
    notes = StepNotes()
    notes.open(A)
    with monkeypatch.context() as patched:
        patched.setattr(step_notes, "_record", broken)
        notes.note(Plan(1, ()), StepTimes(1.0, 1.1, 1.5))
        assert notes.record(LOAD, 2, 1.6) is False
    step(notes, 2, preempted=3)
    assert [(r.step_id, r.preemptions) for r in notes.take(A)] == [(2, 3)]


def test_tokens_are_exact_though_no_step_can_be_recorded(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    apply = pair.decode.apply

    def applied(plan: Plan, result: Result, now: float) -> None:
        """As the engine's shell does it."""
        apply(plan, result, now)
        pair.decode.stepped(plan, StepTimes(now, now, now))

    monkeypatch.setattr(step_notes, "_record", broken)
    monkeypatch.setattr(pair.decode, "apply", applied)
    request = pair.submit(make_work("a", 40, 12))
    pair.run()
    assert tuple(request.tokens) == hash_reference(request.work)
    assert pair.counters(pair.decode)["steps_untold"] == 11  # token 0 is prefill's


def test_what_fell_out_of_the_ring_is_not_told() -> None:
    notes = StepNotes(limit=3)
    notes.open(A)
    for step_id in range(1, 6):
        step(notes, step_id)
    assert [r.step_id for r in notes.take(A)] == [3, 4, 5]


def test_merged_reports_still_say_which_token_came_from_which_step() -> None:
    notes, outbox = StepNotes(), Outbox()
    notes.open(A)
    outbox.open(A)
    merged = Report()
    for step_id, num_tokens in ((1, 2), (2, 0), (3, 1)):
        step(notes, step_id)
        for i in range(num_tokens):
            outbox.add(A, TokenOut(RequestId(f"{step_id}.{i}"), 0, 0, 1, 1))
        for _, report in outbox.drain(step_id, 1.0, LOAD, notes.take):
            merged = merged.merge(report)
    assert [s.step_id for s in merged.steps] == [1, 2, 3]
    assert merged.step_tokens == (2, 0, 1)
    assert [t.request_id for t in merged.tokens] == ["1.0", "1.1", "3.0"]
