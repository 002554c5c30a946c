"""Reserves that wait for blocks get them by class, and one that waits is passed by so many and no more."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from support.pair import Pair
from support.pair_requests import hash_reference, make_work

from decode_svc.attempt import DecodeAttempt
from engine.queues import line_up
from engine.sequence import CLASS_TURNS
from kvrelay.requests import Priority, RequestId, SequenceKey, SessionId

BATCH, NORMAL, INTERACTIVE = Priority


def attempt(arrival: int, priority: Priority) -> DecodeAttempt:
    work = replace(make_work(f"r{arrival}", 10, 2), priority=priority)
    return DecodeAttempt(SequenceKey(SessionId("s"), RequestId(f"r{arrival}"), 1), work, 1, arrival)


def test_a_higher_class_lines_up_before_a_lower_one_that_has_not_been_passed_by_too_many() -> None:
    waiting: deque[DecodeAttempt] = deque()
    for arrival, priority in enumerate((BATCH, NORMAL, BATCH, INTERACTIVE, NORMAL)):
        line_up(waiting, attempt(arrival, priority))
    assert [one.arrival for one in waiting] == [3, 1, 4, 0, 2]
    assert line_up(waiting.copy(), attempt(CLASS_TURNS - 1, NORMAL)) == 3
    assert line_up(waiting.copy(), attempt(CLASS_TURNS, NORMAL)) == 4
    assert line_up(waiting.copy(), attempt(9, INTERACTIVE)) == 1
    assert line_up(waiting.copy(), attempt(9, INTERACTIVE), keep=2) == 2


def test_blocks_that_become_free_go_to_the_higher_class() -> None:
    """Each needs most of the pool, so that one runs after the other; the first one long enough for all to come."""
    pair = Pair(decode_blocks=4)
    order = (("first", NORMAL), ("b0", BATCH), ("b1", BATCH), ("n0", NORMAL), ("i0", INTERACTIVE))
    asked = []
    for name, priority in order:
        asked.append(pair.submit(replace(make_work(name, 40, 20), priority=priority)))
        pair.turn()
    ended: list[str] = []
    while len(ended) < len(asked):
        pair.turn()
        ended += [one.work.request_id for one in asked if one.ended and one.work.request_id not in ended]
    assert ended == ["first", "i0", "n0", "b0", "b1"]
    assert [tuple(one.tokens) for one in asked] == [hash_reference(one.work) for one in asked]
    pair.close()
