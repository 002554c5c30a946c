"""Which token came of which step, over merged and split reports and lives of workers; and how clocks compare."""

from __future__ import annotations

import pytest
from support.fake_workers import LAYOUT

from coordinator.clock_offset import ClockOffset
from coordinator.steps_heard import StepsHeard
from kvrelay.gaps import StepRecord
from kvrelay.models.builtin import builtin_identity
from kvrelay.requests import Incarnation, RequestId, Role, WorkerId
from kvrelay.session import Report, TokenOut, WorkerDescription
from kvrelay.steps import CostModel

D, P = WorkerId("d0"), WorkerId("p0")


def step(step_id: int) -> StepRecord:
    return StepRecord(step_id, float(step_id), forward_s=0.5, batch=2)


def tokens(*names: str) -> tuple[TokenOut, ...]:
    return tuple(TokenOut(RequestId(name), 0, 0, 1, 7) for name in names)


def made_by(heard: StepsHeard, worker: WorkerId, report: Report) -> list[tuple[str, int]]:
    """(request, step id) of each token, 0 without a step."""
    heard.heard(worker, report)
    runs = heard.runs(worker, report.tokens)
    return [(token.request_id, made.step_id if made else 0) for made, run in runs for token in run]


def with_workers(keep: bool = False) -> StepsHeard:
    heard = StepsHeard(keep)
    for role, name in ((Role.DECODE, D), (Role.PREFILL, P)):
        heard.heard(name, Report(welcome=description(role, name)))
    return heard


def description(role: Role, name: WorkerId) -> WorkerDescription:
    model, life = builtin_identity("hash"), Incarnation("one")
    return WorkerDescription(name, role, life, 1, "127.0.0.1:1", model, LAYOUT, 64, "grpc", "hash", 256, 512)


async def test_tokens_of_a_merged_report_are_those_of_its_steps_in_order() -> None:
    report = Report(steps=(step(1), step(2), step(3)), step_tokens=(2, 0, 1), tokens=tokens("a", "b", "c"))
    assert made_by(with_workers(), D, report) == [("a", 1), ("b", 1), ("c", 3)]


async def test_steps_that_cannot_be_added_up_are_counted_and_their_tokens_keep_their_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(self: CostModel, made: StepRecord) -> None:
        raise ValueError("negative increment")

    heard = with_workers()
    report = Report(steps=(step(1), step(2)), step_tokens=(1, 1), tokens=tokens("a", "b"))
    with monkeypatch.context() as patched:
        patched.setattr(CostModel, "add", broken)
        assert made_by(heard, D, report) == [("a", 1), ("b", 2)]
        assert heard.heard(P, Report(steps=(step(3),), step_tokens=(0,))) is False
    assert heard.heard(D, Report(steps=(step(3),), step_tokens=(0,))) is True


async def test_a_report_in_two_frames_goes_on_where_the_first_ended() -> None:
    heard = with_workers()
    first = Report(steps=(step(1), step(2)), step_tokens=(3, 1), tokens=tokens("a", "b"))
    assert made_by(heard, D, first) == [("a", 1), ("b", 1)]
    assert made_by(heard, D, Report(tokens=tokens("c", "d"))) == [("c", 1), ("d", 2)]
    assert made_by(heard, D, Report(tokens=tokens("e"))) == [("e", 0)]


async def test_tokens_of_prefill_have_no_step_nor_have_those_of_a_worker_that_says_none() -> None:
    heard = with_workers()
    assert made_by(heard, P, Report(steps=(step(9),), step_tokens=(1,), tokens=tokens("a"))) == [("a", 0)]
    assert made_by(heard, WorkerId("d9"), Report(tokens=tokens("a"))) == [("a", 0)]


async def test_another_life_begins_anew_and_the_old_ones_steps_are_still_told() -> None:
    heard = with_workers(keep=True)
    heard.heard(D, Report(steps=(step(1),), step_tokens=(1,)))
    old = heard.of(D)
    heard.lost(D)
    assert heard.of(D) is None
    assert old is not None
    assert old in heard.all() and old.is_gone and len(old.untold) == 1
    heard.forget_gone()
    assert old not in heard.all()


def test_the_shortest_round_trip_says_how_far_the_clocks_are_apart() -> None:
    clock = ClockOffset()
    assert clock.best() is None
    clock.sent(1, 100.0)
    clock.heard(1, 40.3, 40.4, 100.9)  # 0.3 s there, 0.5 s back
    clock.sent(2, 101.0)
    clock.heard(2, 41.01, 41.51, 101.52)  # 0.01 s each way
    clock.heard(2, 41.01, 41.9, 102.0)  # the same heartbeat again
    best = clock.best()
    assert best is not None
    assert best.offset_s == pytest.approx(60.0, abs=0.006)
    assert best.error_s == pytest.approx(0.01)


def test_a_round_trip_is_forgotten_after_32_others() -> None:
    clock = ClockOffset()
    for seq in range(1, 40):
        clock.sent(seq, float(seq))
        trip = 0.001 if seq == 1 else 0.1
        clock.heard(seq, seq - 50.0 + trip / 2, seq - 50.0 + trip / 2, seq + trip)
    best = clock.best()
    assert best is not None
    assert best.error_s == pytest.approx(0.05)
