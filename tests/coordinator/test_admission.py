"""Who may come in while a role is without a worker, and what is full."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress

import pytest

from coordinator.admission import NO_WORKER_GRACE_S, Admission
from kvrelay.config import CoordinatorConfig
from kvrelay.errors import ResourceExhausted, Unavailable
from kvrelay.requests import Role

BOTH, NONE = frozenset(Role), frozenset[Role]()
ENDS_AT = 10.0 + NO_WORKER_GRACE_S


def admission(*looks: tuple[frozenset[Role], float]) -> Admission:
    made = Admission(CoordinatorConfig(queue_limit=2, open_limit=3), Counter())
    for present, now in looks:
        made.look(present.__contains__, now)
    return made


def is_let_in(made: Admission, now: float, needs_decode: bool = True) -> bool:
    with suppress(Unavailable):
        made.check(needs_decode, 0, 0, now)
        return True
    return False


def test_a_role_that_never_had_a_worker_is_refused_at_once() -> None:
    assert not is_let_in(admission((NONE, 10.0)), 10.0)
    assert not is_let_in(admission((frozenset({Role.PREFILL}), 10.0)), 10.0)
    assert is_let_in(admission((frozenset({Role.PREFILL}), 10.0)), 10.0, needs_decode=False)


def test_decode_workers_alone_let_everything_in() -> None:
    made = admission((frozenset({Role.DECODE}), 10.0))
    assert is_let_in(made, 10.0)
    assert is_let_in(made, 99.0, needs_decode=False)
    made.look(NONE.__contains__, 100.0)
    assert is_let_in(made, 99.9 + NO_WORKER_GRACE_S)
    assert not is_let_in(made, 100.0 + NO_WORKER_GRACE_S)
    assert not is_let_in(made, 100.0 + NO_WORKER_GRACE_S, needs_decode=False)


def test_a_role_whose_last_worker_went_is_waited_for() -> None:
    made = admission((BOTH, 9.0), (frozenset({Role.PREFILL}), 10.0), (frozenset({Role.PREFILL}), 12.0))
    assert is_let_in(made, ENDS_AT - 0.01)
    assert not is_let_in(made, ENDS_AT)
    assert is_let_in(made, ENDS_AT, needs_decode=False)
    assert (made.hopeless(True, ENDS_AT), made.hopeless(False, ENDS_AT)) == ("decode worker", "")
    made.look(NONE.__contains__, ENDS_AT)
    later = ENDS_AT + NO_WORKER_GRACE_S
    assert (made.hopeless(True, later - 0.01), made.hopeless(False, later - 0.01)) == ("decode worker", "")
    assert (made.hopeless(True, later), made.hopeless(False, later)) == ("worker", "worker")


def test_a_worker_that_came_back_begins_the_wait_anew() -> None:
    made = admission((BOTH, 9.0), (NONE, 10.0), (BOTH, ENDS_AT + 1))
    assert is_let_in(made, ENDS_AT + 1)
    made.look(NONE.__contains__, ENDS_AT + 2)
    assert is_let_in(made, ENDS_AT + 3)


def test_a_look_says_whether_a_role_has_just_lost_its_last_worker() -> None:
    made = Admission(CoordinatorConfig(), Counter())
    looks = [made.look(present.__contains__, 10.0) for present in (NONE, BOTH, NONE, NONE, BOTH)]
    assert looks == [False, False, True, False, False]


@pytest.mark.parametrize(("num_open", "num_queued"), [(3, 0), (0, 2)])
def test_what_is_full_refuses_with_a_hint(num_open: int, num_queued: int) -> None:
    made = admission((BOTH, 10.0))
    made.check(True, num_open - 1 if num_open else 0, num_queued - 1 if num_queued else 0, 10.0)
    with pytest.raises(ResourceExhausted, match="that is the limit") as raised:
        made.check(True, num_open, num_queued, 10.0)
    assert raised.value.retry_after_s == 1.0


def test_room_is_kept_until_it_is_used_or_given_up() -> None:
    made = Admission(CoordinatorConfig(queue_limit=6, open_limit=9), Counter())
    assert made.most_at_once == 6
    with made.room(4, 0, 1) as room:
        assert made.full(0, 1) is None
        assert made.full(0, 2) is not None, "six of six: those that wait and those that room is kept for"
        assert made.full(5, 0) is not None
        made.enter(room)
        assert (room.left, made.full(1, 2)) == (3, None)
        with (
            pytest.raises(
                ResourceExhausted, match="too many requests wait already for 2 more at once; 6 is the limit"
            ) as info,
            made.room(2, 1, 2),
        ):
            pass
        assert info.value.metadata == {"limit": "queue_limit", "most": "6"}
    assert made.full(8, 5) is None
    for _ in range(3):
        made.enter(room)
    assert made.full(8, 5) is None, "nothing is kept any more"
    assert made.full(9, 0) is not None
    assert made.full(0, 6) is not None
