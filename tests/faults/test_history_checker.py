"""The checker of histories catches every kind of corruption, and lets good histories pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from support.golden import Case
from support.history import (
    AcceptedSeen,
    Fault,
    FinishSeen,
    Rules,
    Seen,
    StatusSeen,
    Stream,
    Tally,
    TokenSeen,
    judge,
    leaks,
    tally,
)

CASE = Case((1, 2, 3), 4, None)
ANSWER = (72, 105, 33, 10)
KILL = Fault("kill", "d0", began_at=10.0, ended_at=10.1)
FINISH = FinishSeen("length", "", 3, 4, "p0", "d0", 5.0)
UNAVAILABLE = StatusSeen("UNAVAILABLE", "d0 was lost", 12.0)


class Spelled:
    """The answer to every case is ANSWER; tokens are characters."""

    def tokens(self, case: Case) -> tuple[int, ...]:
        return ANSWER

    def text(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))


def good() -> list[Seen]:
    tokens = [TokenSeen(i, t, chr(t), 1.0 + i) for i, t in enumerate(ANSWER)]
    return [AcceptedSeen("r", 3, 0.5), *tokens, FINISH, StatusSeen("OK", "", 6.0)]


def failed(after: int, status: StatusSeen = UNAVAILABLE) -> list[Seen]:
    return [*good()[: 1 + after], status]


def outcome(seen: list[Seen], faults: Sequence[Fault] = (KILL,), **rules: Any) -> tuple[str, tuple[str, ...]]:
    verdict = judge([Stream("s", CASE, 0.0, tuple(seen))], faults, Spelled(), Rules(**rules))[0]
    return verdict.outcome, verdict.problems


def change(index: int, **values: Any) -> Callable[[list[Seen]], list[Seen]]:
    """The good history with one message changed."""
    return lambda seen: [*seen[:index], replace(seen[index], **values), *seen[index + 1 :]]


def test_a_good_stream_is_exact() -> None:
    assert outcome(good()) == ("exact", ())


@pytest.mark.parametrize("after", range(5))
def test_a_stream_that_fails_soon_after_a_fault_is_unavailable(after: int) -> None:
    assert outcome(failed(after)) == ("unavailable", ())


CORRUPTIONS: dict[str, tuple[Callable[[list[Seen]], list[Seen]], str]] = {
    "a doubled token": (lambda s: [*s[:3], s[2], *s[3:]], "token 1 came where 2 was due"),
    "times that go backwards": (change(2, at=0.1), "times go backwards"),
    "a missing token": (lambda s: [*s[:2], *s[3:]], "token 2 came where 1 was due"),
    "a missing first token": (lambda s: [s[0], *s[2:]], "token 1 came where 0 was due"),
    "a missing last token": (lambda s: [*s[:4], *s[5:]], "3 tokens, one process gives 4"),
    "one token too many": (lambda s: [*s[:5], TokenSeen(4, 7, "", 4.0), *s[5:]], "more than 4 tokens"),
    "a wrong id": (change(2, token_id=106), "token 1 is 106, one process gives 105"),
    "two tokens swapped": (lambda s: [*s[:2], s[3], s[2], *s[4:]], "token 2 came where 1 was due"),
    "wrong text": (change(2, text="j"), "the text pieces join to 'Hj!\\n', not to 'Hi!\\n'"),
    "text lost": (change(2, text=""), "the text pieces join to 'H!\\n', not to 'Hi!\\n'"),
    "two finishes": (lambda s: [*s[:6], s[5], *s[6:]], "2 finishes"),
    "two statuses": (lambda s: [*s, s[-1]], "something after the final status"),
    "no status": (lambda s: s[:-1], "no final status"),
    "no finish": (lambda s: [*s[:5], s[-1]], "status OK without a finish"),
    "a token after the finish": (lambda s: [*s[:4], s[5], replace(s[4], at=5.5), s[6]], "a token after the finish"),
    "a finish and then an error": (
        lambda s: [*s[:-1], UNAVAILABLE],
        "a finish, and then UNAVAILABLE (d0 was lost)",
    ),
    "not accepted": (lambda s: s[1:], "never accepted"),
    "accepted twice": (lambda s: [s[0], *s], "accepted more than once, or late"),
    "a wrong count": (change(5, completion_tokens=5), "usage says 5 tokens, 4 are right"),
    "a wrong prompt count": (change(5, prompt_tokens=2), "usage says 2 prompt tokens, 3 were sent"),
    "a wrong reason": (change(5, reason="stop"), "finish reason stop"),
    "an error of another kind": (lambda s: failed(2, StatusSeen("INTERNAL", "bug", 12.0)), "ended INTERNAL (bug)"),
    "a late error": (
        lambda s: failed(2, replace(UNAVAILABLE, at=15.3)),
        "ended UNAVAILABLE (d0 was lost) 5.2 s after the last fault",
    ),
    "an error before the fault": (
        lambda s: failed(2, replace(UNAVAILABLE, at=9.0)),
        "ended UNAVAILABLE (d0 was lost) before any fault",
    ),
    "a wrong token before an error": (
        lambda s: [*change(1, token_id=73)(s)[:2], UNAVAILABLE],
        "token 0 is 73, one process gives 72",
    ),
    "a refusal after tokens": (
        lambda s: failed(1, StatusSeen("RESOURCE_EXHAUSTED", "full", 12.0)),
        "ended RESOURCE_EXHAUSTED (full)",
    ),
}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_every_kind_of_corruption_is_caught(name: str) -> None:
    corrupt, said = CORRUPTIONS[name]
    seen, problems = outcome(corrupt(good()), refusals=frozenset({"RESOURCE_EXHAUSTED"}))
    assert seen == "violation"
    assert said in problems


def test_an_error_without_any_fault_is_a_violation() -> None:
    assert outcome(failed(2), faults=()) == ("violation", ("ended UNAVAILABLE (d0 was lost) before any fault",))


def test_a_refusal_before_any_token_is_allowed_only_where_it_is_said_to_be() -> None:
    full = failed(0, StatusSeen("RESOURCE_EXHAUSTED", "full", 1.0))
    assert outcome(full) == ("violation", ("ended RESOURCE_EXHAUSTED (full)",))
    assert outcome(full, refusals=frozenset({"RESOURCE_EXHAUSTED"})) == ("refused", ())


def test_a_client_that_left_expects_no_status_but_right_tokens() -> None:
    stream = Stream("s", CASE, 0.0, tuple(good()[:3]), left_at=4.0)
    assert judge([stream], (), Spelled())[0].outcome == "left"
    wrong = replace(stream, seen=(*stream.seen, TokenSeen(2, 34, "", 3.5)))
    assert judge([wrong], (), Spelled())[0].problems == ("token 2 is 34, one process gives 33",)


def test_a_tally_counts_outcomes_and_holds_them_to_one_in_a_hundred() -> None:
    streams = [Stream("s", CASE, 0.0, tuple(good()))] * 99 + [Stream("f", CASE, 0.0, tuple(failed(1)))]
    counted = tally(judge(streams, (KILL,), Spelled()))
    assert counted == Tally(exact=99, unavailable=1)
    assert counted.within_budget
    assert not (counted + Tally(unavailable=1)).within_budget


WORKER: dict[str, Any] = {
    "id": "d0",
    "blocks": {"total": 9, "free": 7, "held": 0, "cached": 2, "reserved": 0, "quarantined": 0},
    "running": 0,
    "waiting": 0,
    "queued_tokens": 0,
    "transfers_in_flight": 0,
    "counters": {"preempted": 3},
}


def test_an_idle_worker_leaks_nothing() -> None:
    assert leaks([WORKER]) == []


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"running": 1}, "d0: running 1"),
        ({"waiting": 2}, "d0: waiting 2"),
        ({"transfers_in_flight": 1}, "d0: transfers_in_flight 1"),
        ({"queued_tokens": 5}, "d0: queued_tokens 5"),
        ({"counters": {"preempted": -1}}, "d0: counter preempted is -1"),
        ({"blocks": {**WORKER["blocks"], "free": 6, "quarantined": 1}}, "d0: 1 blocks quarantined"),
        ({"blocks": {**WORKER["blocks"], "free": 6, "held": 1}}, "d0: 1 blocks held"),
        ({"blocks": {**WORKER["blocks"], "free": 6, "reserved": 1}}, "d0: 1 blocks reserved"),
        ({"blocks": {**WORKER["blocks"], "free": 6}}, "d0: blocks do not add up:"),
    ],
)
def test_every_kind_of_leak_is_caught(changed: dict[str, Any], said: str) -> None:
    (problem,) = leaks([{**WORKER, **changed}])
    assert problem.startswith(said)
