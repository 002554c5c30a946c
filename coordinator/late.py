"""Which gaps of an ended request were late, and why: sums for metrics, a few single ones for its trace. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import sub

from coordinator.live import Attempt, Live
from kvrelay.gaps import CAUSES, Cause, TokenPoint, accumulate_stream, split
from kvrelay.telemetry.request_trace import Late

LATE_TIMES = 10.0
LATE_S = 0.1
"""A gap over both, so many times the stream's median and so long, is worth an event."""
MAX_LATE = 16


@dataclass(slots=True)
class Gaps:
    """Of one request with all its sequences. gaps: seconds of each sequence, sorted; by_cause: in the order of CAUSES.

    late: of each sequence, by its number, those worth an event.
    """

    gaps: list[list[float]] = field(default_factory=list)
    by_cause: list[float] = field(default_factory=lambda: [0.0] * len(CAUSES))
    late: dict[int, tuple[Late, ...]] = field(default_factory=dict)

    @property
    def longest_s(self) -> float:
        return max((gaps[-1] for gaps in self.gaps if gaps), default=0.0)


def gaps_of(live: Live, with_causes: bool = True) -> Gaps:
    """Tokens that were never written are left out. with_causes: sum them up, which takes most of the time."""
    out = Gaps()
    for one in live.children or (live,):
        sent = one.journal.sent
        gaps = list(map(sub, sent[1:], sent))
        if with_causes:
            _by_cause(one, out.by_cause)
        ordered = sorted(gaps)
        out.gaps.append(ordered)
        if ordered and ordered[-1] > LATE_S:
            out.late[one.sequence] = _late(one, gaps, max(LATE_S, LATE_TIMES * ordered[len(ordered) // 2]))
    return out


def _attempts(live: Live, num_tokens: int) -> Iterator[tuple[Attempt, int, int]]:
    """Each attempt that brought tokens, with the first of them and the one after the last."""
    tries = [*live.lost, live.attempt]
    for i, attempt in enumerate(tries):
        end = min(num_tokens, tries[i + 1].first_index if i + 1 < len(tries) else num_tokens)
        if attempt.first_index < end:
            yield attempt, attempt.first_index, end


def _by_cause(live: Live, by_cause: list[float]) -> None:
    journal = live.journal
    arrived, sent, steps = journal.times, journal.sent, journal.steps
    for attempt, begin, end in _attempts(live, len(sent)):
        log = attempt.steps.log if attempt.steps is not None else None
        exposed_s = attempt.pushed.exposed_s if attempt.pushed is not None else 0.0
        accumulate_stream(by_cause, arrived[begin:end], sent[begin:end], steps[begin:end], log, exposed_s)
        if begin:
            for cause, seconds in _one(live, begin).items():
                by_cause[CAUSES.index(cause)] += seconds


def _one(live: Live, index: int) -> dict[Cause, float]:
    """The gap before token `index` by cause."""
    points = []
    log, exposed_s = None, 0.0
    for at in (index - 1, index):
        for number, (attempt, begin, end) in enumerate(_attempts(live, len(live.journal.sent))):
            if begin <= at < end:
                journal = live.journal
                points.append(TokenPoint(journal.times[at], journal.sent[at], number, journal.steps[at]))
                log = attempt.steps.log if attempt.steps is not None else None
                exposed_s = attempt.pushed.exposed_s if attempt.pushed is not None else 0.0
    return split(points[0], points[1], log, exposed_s)


def _late(live: Live, gaps: list[float], over_s: float) -> tuple[Late, ...]:
    """The longest of those over the limit, in their order."""
    found = sorted(range(len(gaps)), key=gaps.__getitem__, reverse=True)[:MAX_LATE]
    out = []
    for i in sorted(index for index in found if gaps[index] > over_s):
        causes = _one(live, i + 1)
        worst = max(causes, key=causes.__getitem__)
        out.append(Late(i + 1, gaps[i], worst.value, live.journal.sent[i + 1] - live.times.accepted_at))
    return tuple(out)
