from __future__ import annotations

from dataclasses import dataclass, replace

from kvrelay.requests import RequestId, Sampling, SequenceKey, SessionId, StopRule
from kvrelay.session import Work
from worker.attempts import SPARE_DEADLINES, Attempts


@dataclass
class Attempt:
    key: SequenceKey
    work: Work


WORK = Work(RequestId(""), 1, (1,), 1, Sampling(0.0), StopRule(1), deadline_s=3600.0)


def attempt(number: int, deadline_s: float = 3600.0) -> Attempt:
    key = SequenceKey(SessionId("s"), RequestId(str(number)), 1)
    return Attempt(key, replace(WORK, request_id=key.request_id, deadline_s=deadline_s))


def test_deadlines_of_what_has_ended_do_not_pile_up() -> None:
    attempts: Attempts[Attempt] = Attempts()
    attempts.add(attempt(-1, deadline_s=10.0), 0.0)
    for number in range(20_000):
        attempts.add(attempt(number), 0.0)
        attempts.remove(attempt(number).key)
    assert len(attempts._deadlines) <= SPARE_DEADLINES + 4
    assert attempts.next_deadline() == 10.0
    assert [a.key.request_id for a in attempts.expired(11.0)] == ["-1"]
