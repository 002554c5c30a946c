"""What a worker tells of its steps: each once per session that asked, with phases that leave no time out."""

from __future__ import annotations

import pytest

from engine.plan import Phases, Plan, SequenceSlice
from kvrelay.blocks import BlockCounts, BlockTable
from kvrelay.requests import RequestId, Sampling, SequenceKey, SessionId
from kvrelay.session import Load, Report, TokenOut
from worker.outbox import Outbox
from worker.step_notes import StepNotes, StepTimes

A, B = SessionId("a"), SessionId("b")
LOAD = Load(BlockCounts(100, 40, held=30, cached=20, reserved=10), transfers_in_flight=3)


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
