from __future__ import annotations

import pytest

from decode_svc.grants import MAX_PASSING_S, PoolRoom, next_grant


@pytest.mark.parametrize(
    ("needs", "spare", "promised", "blocked_s", "granted"),
    [
        ([], 100, 0, 0.0, None),
        ([10], 100, 0, 0.0, 0),
        ([10], 9, 0, 0.0, None),
        ([90], 100, 0, 0.0, 0),  # one request may hold more than half the pool
        ([90], 100, 1, 0.0, None),  # but not beside other tickets
        ([45, 4], 100, 10, 0.0, 1),  # a smaller one passes the blocked head
        ([45, 4], 100, 10, MAX_PASSING_S, None),  # for a bounded time
        ([30, 20], 100, 20, 0.0, 0),
        ([31, 20], 100, 20, 0.0, 1),
    ],
)
def test_grants_are_fifo_within_the_room(
    needs: list[int], spare: int, promised: int, blocked_s: float, granted: int | None
) -> None:
    assert next_grant(needs, PoolRoom(100, spare, promised), blocked_s) == granted
