"""What clients saw, as values, and whether it keeps what we promise. Pure: knows no sockets, processes or clocks.

A stream's history is every message in the order it came. Errors are allowed only of a kind that a fault may cause and
only soon after a fault that is in the same history; tokens must be those of one process, whatever happened.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from support.golden import Case

SOON_S = 5.0
"""How long after a fault a stream may still fail because of it."""


@dataclass(frozen=True, slots=True)
class AcceptedSeen:
    request_id: str
    prompt_tokens: int
    at: float


@dataclass(frozen=True, slots=True)
class TokenSeen:
    index: int
    token_id: int
    text: str
    at: float


@dataclass(frozen=True, slots=True)
class FinishSeen:
    """text: what was held back until the end; migrations: how often the request was moved."""

    reason: str
    text: str
    prompt_tokens: int
    completion_tokens: int
    prefill: str
    decode: str
    at: float
    migrations: int = 0


@dataclass(frozen=True, slots=True)
class StatusSeen:
    """code: name of the gRPC status, OK for a good end."""

    code: str
    message: str
    at: float


Seen = AcceptedSeen | TokenSeen | FinishSeen | StatusSeen


@dataclass(frozen=True, slots=True)
class Stream:
    """One request as its client saw it. left_at: the client went away then and expects nothing more."""

    name: str
    case: Case
    sent_at: float
    seen: tuple[Seen, ...]
    left_at: float | None = None

    @property
    def tokens(self) -> tuple[TokenSeen, ...]:
        return tuple(s for s in self.seen if isinstance(s, TokenSeen))

    @property
    def status(self) -> StatusSeen | None:
        return next((s for s in self.seen if isinstance(s, StatusSeen)), None)

    @property
    def finish(self) -> FinishSeen | None:
        return next((s for s in self.seen if isinstance(s, FinishSeen)), None)

    @property
    def longest_gap_s(self) -> float:
        """Between two tokens, or from sending to the first one."""
        times = [self.sent_at, *(token.at for token in self.tokens)]
        return max((b - a for a, b in itertools.pairwise(times)), default=0.0)


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that was done to the cluster, with the proof that it happened. Times as in the streams."""

    kind: str
    target: str
    began_at: float
    ended_at: float
    proof: Mapping[str, Any] = field(default_factory=dict)


class Reference(Protocol):
    """What one process gives."""

    def tokens(self, case: Case) -> tuple[int, ...]: ...

    def text(self, token_ids: Sequence[int]) -> str: ...


@dataclass(frozen=True, slots=True)
class Rules:
    """after_fault: statuses that a fault may cause, soon after it. refusals: those that may come before any token."""

    after_fault: frozenset[str] = frozenset({"UNAVAILABLE"})
    refusals: frozenset[str] = frozenset()
    soon_s: float = SOON_S


@dataclass(frozen=True, slots=True)
class Verdict:
    """outcome: exact, unavailable (any status that a fault may cause), refused, left or violation."""

    stream: Stream
    outcome: str
    problems: tuple[str, ...] = ()


def judge(
    streams: Iterable[Stream], faults: Sequence[Fault], reference: Reference, rules: Rules | None = None
) -> list[Verdict]:
    rules = rules or Rules()
    return [_judge(stream, faults, reference, rules) for stream in streams]


def _judge(stream: Stream, faults: Sequence[Fault], reference: Reference, rules: Rules) -> Verdict:
    expected = reference.tokens(stream.case)
    problems = [*_shape(stream), *_token_problems(stream, expected), *_text_problems(stream, reference.text(expected))]
    status = stream.status
    if stream.left_at is not None:
        outcome = "left"
    elif status is None:
        outcome = "violation"
    elif status.code == "OK":
        outcome = "exact"
        problems += _finish_problems(stream, expected)
    else:
        outcome = "refused" if status.code in rules.refusals and not stream.tokens else "unavailable"
        problems += _error_problems(stream, status, faults, rules)
    return Verdict(stream, "violation" if problems else outcome, tuple(problems))


def _shape(stream: Stream) -> list[str]:
    """One acceptance before anything else, at most one finish, exactly one status and nothing after it."""
    kinds = [type(s) for s in stream.seen]
    problems = []
    if AcceptedSeen in kinds and (kinds.count(AcceptedSeen) > 1 or kinds[0] is not AcceptedSeen):
        problems.append("accepted more than once, or late")
    if AcceptedSeen not in kinds and {TokenSeen, FinishSeen} & set(kinds):
        problems.append("never accepted")
    if kinds.count(FinishSeen) > 1:
        problems.append(f"{kinds.count(FinishSeen)} finishes")
    if FinishSeen in kinds and TokenSeen in kinds[kinds.index(FinishSeen) :]:
        problems.append("a token after the finish")
    statuses = kinds.count(StatusSeen)
    if statuses > 1 or (statuses == 1 and kinds[-1] is not StatusSeen):
        problems.append("something after the final status")
    if not statuses and stream.left_at is None:
        problems.append("no final status")
    times = [stream.sent_at, *(s.at for s in stream.seen)]
    if times != sorted(times):
        problems.append("times go backwards")
    return problems


def _token_problems(stream: Stream, expected: tuple[int, ...]) -> list[str]:
    """Indexes 0, 1, 2 ... and the ids of one process, as far as they go."""
    for due, token in enumerate(stream.tokens):
        if token.index != due:
            return [f"token {token.index} came where {due} was due"]
        if due >= len(expected):
            return [f"more than {len(expected)} tokens"]
        if token.token_id != expected[due]:
            return [f"token {due} is {token.token_id}, one process gives {expected[due]}"]
    return []


def _text_problems(stream: Stream, expected: str) -> list[str]:
    finish = stream.finish
    text = "".join(token.text for token in stream.tokens) + (finish.text if finish else "")
    if finish is not None and text != expected:
        return [f"the text pieces join to {text!r}, not to {expected!r}"]
    if not expected.startswith(text):
        return [f"the text pieces join to {text!r}, which does not begin {expected!r}"]
    return []


def _finish_problems(stream: Stream, expected: tuple[int, ...]) -> list[str]:
    finish = stream.finish
    if finish is None:
        return ["status OK without a finish"]
    problems = []
    if len(stream.tokens) != len(expected):
        problems.append(f"{len(stream.tokens)} tokens, one process gives {len(expected)}")
    if finish.reason != "length":  # EOS is ignored in every case
        problems.append(f"finish reason {finish.reason}")
    if finish.completion_tokens != len(expected):
        problems.append(f"usage says {finish.completion_tokens} tokens, {len(expected)} are right")
    if finish.prompt_tokens != len(stream.case.prompt):
        problems.append(f"usage says {finish.prompt_tokens} prompt tokens, {len(stream.case.prompt)} were sent")
    return problems


def _error_problems(stream: Stream, status: StatusSeen, faults: Sequence[Fault], rules: Rules) -> list[str]:
    said = f"{status.code} ({status.message})"
    if stream.finish is not None:
        return [f"a finish, and then {said}"]
    if status.code in rules.refusals and not stream.tokens:
        return []
    if status.code not in rules.after_fault:
        return [f"ended {said}"]
    if any(f.began_at <= status.at <= f.ended_at + rules.soon_s for f in faults):
        return []
    ages = [status.at - f.ended_at for f in faults if f.began_at <= status.at]
    last = f"{min(ages):.1f} s after the last fault" if ages else "before any fault"
    return [f"ended {said} {last}"]


def leaks(workers: Sequence[Mapping[str, Any]]) -> list[str]:
    """What is not as it must be when nothing is asked for: blocks, transfers, sequences, counters of every worker."""
    problems = []
    for worker in workers:
        name, blocks = worker["id"], worker["blocks"]
        states = {state: count for state, count in blocks.items() if state != "total"}
        if sum(states.values()) != blocks["total"]:
            problems.append(f"{name}: blocks do not add up: {blocks}")
        problems += [f"{name}: {n} blocks {s}" for s, n in states.items() if n and s not in ("free", "cached")]
        for what in ("running", "waiting", "transfers_in_flight", "queued_tokens"):
            if worker[what]:
                problems.append(f"{name}: {what} {worker[what]}")
        problems += [f"{name}: counter {key} is {n}" for key, n in worker["counters"].items() if n < 0]
    return problems


@dataclass(frozen=True, slots=True)
class Tally:
    """How many streams ended how."""

    exact: int = 0
    unavailable: int = 0
    refused: int = 0
    left: int = 0
    violations: tuple[str, ...] = ()

    @property
    def judged(self) -> int:
        """Streams that count for the budget: those that were taken in and stayed."""
        return self.exact + self.unavailable

    @property
    def within_budget(self) -> bool:
        """At most one stream in a hundred is unavailable."""
        return self.unavailable * 100 <= self.judged

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.exact + other.exact,
            self.unavailable + other.unavailable,
            self.refused + other.refused,
            self.left + other.left,
            self.violations + other.violations,
        )


def tally(verdicts: Iterable[Verdict]) -> Tally:
    verdicts = list(verdicts)
    count = {name: sum(v.outcome == name for v in verdicts) for name in ("exact", "unavailable", "refused", "left")}
    said = tuple(f"{_about(v.stream)}: {p}" for v in verdicts for p in v.problems)
    return Tally(**count, violations=said)


def _about(stream: Stream) -> str:
    ids = [s.request_id for s in stream.seen if isinstance(s, AcceptedSeen)]
    size = f"{len(stream.case.prompt)} -> {len(stream.tokens)} of {stream.case.max_tokens} tokens"
    return f"stream {stream.name} ({', '.join([*ids, size])})"
