"""The desk of a core: aborts and endings of single sequences, news of the cache in its reports, lists on demand."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from support.pair_requests import make_work

from kvrelay.blocks import BlockCounts, BlockEventKind, BlockEvents, BlockKey, BlockList, BlockRun
from kvrelay.requests import RequestId, SequenceKey, SessionId
from kvrelay.session import Abort, Ended, Load, Report, TokenOut, Work
from worker.attempts import key_of
from worker.desk import Desk
from worker.events import BlocksAsked, BlocksListed, CommandReceived, DrainAsked, SendReport, SessionOpened

S = SessionId("s")
R = RequestId("r")
LOAD = Load(BlockCounts(8, 8))
STORED = BlockEventKind.STORED
KEY = BlockKey(b"k" * 32)


@dataclass
class Forked:
    """An attempt of three sequences."""

    key: SequenceKey
    work: Work
    open: list[int] = field(default_factory=lambda: [0, 1, 2])


class FakeCache:
    def __init__(self) -> None:
        self.runs: tuple[BlockRun, ...] = ()

    def take_events(self) -> tuple[BlockRun, ...]:
        taken, self.runs = self.runs, ()
        return taken

    def keys(self) -> tuple[BlockKey, ...]:
        return (KEY,)


class Core:
    """As much of one as owns a desk."""

    def __init__(self, cache: FakeCache | None = None, *, by_sequence: bool = True) -> None:
        self.dropped: list[object] = []
        self.desk: Desk[Forked] = Desk(
            self._drop,
            lambda attempt, moving: False,
            drop_sequence=self._drop_sequence if by_sequence else None,
            open_sequences=lambda attempt: attempt.open,
            cache=cache,
        )
        self.desk.handle(SessionOpened(S, "c"), 10.0)

    def add(self, deadline_s: float | None = None) -> Forked:
        attempt = Forked(key_of(S, R, 1), replace(make_work("r", 3, 3), deadline_s=deadline_s))
        self.desk.attempts.add(attempt, 10.0)
        return attempt

    def _drop(self, attempt: Forked, now: float) -> None:
        self.desk.attempts.remove(attempt.key)
        self.dropped.append(attempt.key)
        attempt.open.clear()

    def _drop_sequence(self, attempt: Forked, sequence: int, now: float) -> None:
        self.dropped.append(sequence)

    def abort(self, sequence: int | None, attempt: int = 1) -> None:
        self.desk.handle(CommandReceived(S, Abort(R, attempt, sequence)), 10.0)

    def report(self, now: float = 10.0) -> Report | None:
        sent = [a.report for a in self.desk.take_actions(LOAD, now) if isinstance(a, SendReport)]
        return sent[0] if sent else None

    def ended(self) -> list[tuple[int, str, str]]:
        report = self.report()
        return [(e.sequence, e.reason, e.code) for e in report.ended] if report is not None else []


def test_an_abort_of_one_sequence_reaches_the_core_and_leaves_the_attempt() -> None:
    core = Core()
    attempt = core.add()
    core.abort(2)
    core.abort(0)
    assert core.dropped == [2, 0]
    assert core.desk.attempts.get(attempt.key) is attempt


def test_an_abort_of_all_sequences_drops_the_attempt() -> None:
    core = Core()
    attempt = core.add()
    core.abort(None)
    assert core.dropped == [attempt.key]


def test_a_core_that_knows_no_sequences_drops_the_whole_attempt() -> None:
    core = Core(by_sequence=False)
    attempt = core.add()
    core.abort(1)
    assert core.dropped == [attempt.key]


def test_only_the_abort_of_a_whole_attempt_is_remembered_until_it_comes() -> None:
    core = Core()
    core.abort(1, attempt=7)
    assert core.desk.is_news(key_of(S, R, 7))
    core.abort(None, attempt=7)
    assert not core.desk.is_news(key_of(S, R, 7))


def test_one_sequence_ends_while_the_attempt_lives_on() -> None:
    core = Core()
    attempt = core.add()
    core.desk.end_sequence(replace(attempt.key, sequence=1), "stop")
    assert core.desk.attempts.get(attempt.key) is attempt
    attempt.open.remove(1)
    core.desk.end(attempt.key, "length")
    assert core.desk.attempts.get(attempt.key) is None
    core.desk.end_sequence(replace(attempt.key, sequence=2), "stop")
    core.desk.end(attempt.key, "length")
    report = core.report()
    assert report is not None
    assert report.ended == (Ended(R, 1, 1, "stop"), Ended(R, 1, 0, "length"), Ended(R, 1, 2, "length"))


def test_the_last_sequence_may_end_its_attempt_under_its_own_key() -> None:
    core = Core()
    attempt = core.add()
    attempt.open[:] = [2]
    core.desk.end(replace(attempt.key, sequence=2), "length")
    assert core.ended() == [(2, "length", "")]
    assert len(core.desk.attempts) == 0


def test_a_deadline_and_a_drain_end_each_sequence_that_is_not_over() -> None:
    late = Core()
    late.add(deadline_s=1.0).open.remove(1)
    late.desk.expire(11.0)
    assert late.ended() == [(0, "failed", "DeadlineExceeded"), (2, "failed", "DeadlineExceeded")]
    leaving = Core()
    leaving.add().open.remove(0)
    leaving.desk.handle(DrainAsked(4.0), 10.0)
    assert leaving.ended() == [(1, "failed", "Unavailable"), (2, "failed", "Unavailable")]


def test_news_of_the_cache_goes_with_a_report_that_has_more_to_say() -> None:
    cache = FakeCache()
    core = Core(cache)
    cache.runs = (BlockRun(STORED, (KEY,)),)
    core.desk.tell(key_of(S, R, 1), TokenOut(R, 1, 0, 0, 7))
    report = core.report()
    assert report is not None
    assert (report.block_events, len(report.tokens)) == ((BlockEvents(1, (BlockRun(STORED, (KEY,)),)),), 1)


def test_news_of_the_cache_alone_makes_one_report_a_quarter_of_a_second_later() -> None:
    cache = FakeCache()
    core = Core(cache)
    cache.runs = (BlockRun(STORED, (KEY,)),)
    assert core.report(10.0) is None
    assert core.desk.next_due() == 10.25
    assert core.report(10.2) is None
    report = core.report(10.25)
    assert report is not None
    assert report.block_events == (BlockEvents(1, (BlockRun(STORED, (KEY,)),)),)
    assert report.load == LOAD
    assert core.desk.next_due() is None
    assert core.report(11.0) is None


def test_a_question_for_the_blocks_is_answered_with_all_that_happened_by_then() -> None:
    cache = FakeCache()
    core = Core(cache)
    cache.runs = (BlockRun(STORED, (KEY,)),)
    core.desk.handle(BlocksAsked(41), 10.0)
    assert core.desk.take_actions(LOAD, 10.0) == [BlocksListed(41, BlockList(2, (KEY,)))]


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_both_cores_answer_a_question_for_their_blocks(role: str) -> None:
    from support.pair import Pair

    pair = Pair()
    core = pair.prefill if role == "prefill" else pair.decode
    core.handle(BlocksAsked(3), pair.now)
    assert [a for a in core.actions(pair.now) if isinstance(a, BlocksListed)] == [BlocksListed(3, BlockList(1, ()))]
    pair.close()
