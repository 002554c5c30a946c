"""Liveness, attempts, outbox, throughput, refusals: the small pure parts of a worker."""

from __future__ import annotations

from dataclasses import dataclass, replace

from support.pair_requests import make_work

from kvrelay.blocks import BlockCounts
from kvrelay.requests import RequestId, Sampling, SequenceKey, SessionId, StopRule
from kvrelay.session import Ended, Load, TokenOut, Work
from worker.attempts import MAX_TOMBSTONES, Attempts, key_of
from worker.outbox import Outbox
from worker.refusals import refuse_work
from worker.throughput import Throughput

S = SessionId("s")
BIAS = "sampling.logit_bias"
LOAD = Load(BlockCounts(8, 8))


@dataclass
class FakeAttempt:
    key: SequenceKey
    work: Work


def attempt(name: str, deadline_s: float | None = None) -> FakeAttempt:
    work = replace(make_work(name, 3, 3), deadline_s=deadline_s)
    return FakeAttempt(key_of(S, work.request_id, 1), work)


def test_expired_looks_past_live_attempts_and_names_each_once() -> None:
    attempts: Attempts[FakeAttempt] = Attempts()
    for a in (attempt("long", 100.0), attempt("none"), attempt("b", 1.0), attempt("c", 2.0), attempt("gone", 1.5)):
        attempts.add(a, 10.0)
    attempts.remove(key_of(S, RequestId("gone"), 1))
    assert attempts.next_deadline() == 11.0
    assert [a.work.request_id for a in attempts.expired(12.0)] == ["b", "c"]
    assert attempts.expired(12.0) == []
    assert attempts.next_deadline() == 110.0


def test_tombstones_are_bounded_and_the_oldest_goes_first() -> None:
    attempts: Attempts[FakeAttempt] = Attempts()
    keys = [key_of(S, RequestId(str(i)), 1) for i in range(MAX_TOMBSTONES + 1)]
    for key in keys:
        attempts.bury(key)
    assert not attempts.is_buried(keys[0])
    assert attempts.is_buried(keys[1])
    assert attempts.is_buried(keys[-1])


def test_outbox_makes_one_report_a_session_and_drops_items_of_closed_ones() -> None:
    outbox = Outbox()
    other = SessionId("other")
    outbox.open(S)
    outbox.open(other)
    tokens = [TokenOut(RequestId("a"), 1, 0, i, i + 5) for i in range(3)]
    for token in tokens:
        outbox.add(S, token)
    ended = Ended(RequestId("a"), 1, 0, "stop")
    outbox.add(S, ended)
    outbox.close(other)
    outbox.add(other, ended)
    [(session, report)] = outbox.drain(4, 1.5, LOAD)
    assert (session, report.step_id, report.load) == (S, 4, LOAD)
    assert report.tokens == tuple(tokens)
    assert report.ended == (ended,)
    assert outbox.drain(5, 1.6, LOAD) == []


def test_throughput_counts_the_last_two_seconds() -> None:
    rate = Throughput()
    for i in range(40):
        rate.add(10, 100.0 + i * 0.125)
    assert rate.per_s(104.875) == 16 * 10 / 2
    assert rate.per_s(105.875) == 8 * 10 / 2
    assert rate.per_s(107.0) == 0.0


def test_refusals_name_the_field() -> None:
    good = make_work("a", 10, 5)
    cases: dict[str, tuple[Work, str, str]] = {
        "empty": (replace(good, token_ids=(), num_prompt_tokens=0), "InvalidArgument", "token_ids"),
        "prompt": (replace(good, num_prompt_tokens=11), "InvalidArgument", "num_prompt_tokens"),
        "context": (replace(good, token_ids=(1,) * 100, num_prompt_tokens=100), "InvalidArgument", "token_ids"),
        "vocabulary": (replace(good, token_ids=(1,) * 9 + (258,)), "InvalidArgument", "token_ids"),
        "negative": (replace(good, token_ids=(1,) * 9 + (-1,)), "InvalidArgument", "token_ids"),
        "bias": (replace(good, sampling=Sampling(logit_bias=((3, 1.0), (258, 1.0)))), "InvalidArgument", BIAS),
        "bias below": (replace(good, sampling=Sampling(logit_bias=((-1, 1.0),))), "InvalidArgument", BIAS),
        "nothing left": (replace(good, stop=StopRule(0)), "InvalidArgument", "max_tokens"),
    }
    found = {}
    for name, (work, _, _) in cases.items():
        refused = refuse_work(work, 100, 258, draining=False)
        found[name] = (work, refused.code, refused.field) if refused else None
    assert found == cases
    assert refuse_work(good, 100, 258, draining=False) is None
    draining = refuse_work(good, 100, 258, draining=True)
    assert draining is not None
    assert draining.code == "Unavailable"
