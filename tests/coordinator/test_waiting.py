"""Who of those that wait goes first: by class, by arrival, and by how long they have waited."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from support.lifecycles import facts

from coordinator.events import Cause, Loss
from coordinator.live import Attempt, Live, Times
from coordinator.output import OutputText
from coordinator.passing import PASS_S
from coordinator.router import Rules
from coordinator.states import State
from coordinator.stream import StreamBuffer
from coordinator.text import ByteCodec
from coordinator.views import DecodeView, PrefillView, Snapshot
from coordinator.waiting import AGE_S, WaitingLine
from kvrelay.requests import Priority, RequestId, WorkerId

BATCH, NORMAL, INTERACTIVE = Priority
FREE = Snapshot((), (DecodeView(WorkerId("d0"), "d0:1", free_blocks=100, total_blocks=100),))
FULL = Snapshot((), ())


def live(order: int, priority: Priority = NORMAL, at: float = 0.0, prompt: int = 17) -> Live:
    """One that came at this time, named by its place."""
    what = replace(facts(), request_id=RequestId(f"r{order}"), priority=priority, prompt_ids=tuple(range(prompt)))
    text = OutputText(ByteCodec().detokenizer(), None, frozenset())
    return Live(State(what), order, text, StreamBuffer(1000), Times(at, 0), Attempt(at))


def line_of(*lives: Live) -> WaitingLine:
    line = WaitingLine(Rules())
    for one in lives:
        line.add(one)
    return line


def orders(line: WaitingLine) -> list[int]:
    return [one.order for one in line.lives()]


def taken(line: WaitingLine, now: float = 0.0) -> list[int]:
    """All, in the order in which they are placed."""
    found = []
    while (one := line.take(FREE, now)) is not None:
        found.append(one[0].order)
    return found


def test_the_higher_class_goes_first_and_within_a_class_who_came_first() -> None:
    classes = (BATCH, NORMAL, INTERACTIVE, BATCH, INTERACTIVE, NORMAL)
    line = line_of(*(live(order, priority, at=order / 10) for order, priority in enumerate(classes)))
    assert len(line) == 6
    assert orders(line) == [2, 4, 1, 5, 0, 3]
    assert taken(line) == [2, 4, 1, 5, 0, 3]
    assert len(line) == 0


@pytest.mark.parametrize(
    ("low", "high", "ages"), [(BATCH, NORMAL, 1), (NORMAL, INTERACTIVE, 1), (BATCH, INTERACTIVE, 2)]
)
def test_a_class_counts_as_much_as_ten_seconds_of_waiting(low: Priority, high: Priority, ages: int) -> None:
    assert AGE_S == 10.0
    old = live(0, low, at=100.0)
    soon, late = live(1, high, at=100.0 + ages * AGE_S - 0.1), live(2, high, at=100.0 + ages * AGE_S + 0.1)
    assert orders(line_of(old, soon, late)) == [1, 0, 2]
    assert taken(line_of(old, soon, late), now=1000.0) == [1, 0, 2]


def test_nobody_starves_behind_a_class_that_never_ends() -> None:
    """One a second is placed, and one a second comes: what waits goes when its time has made up for its class."""
    line = line_of(live(0, BATCH), live(1, NORMAL, at=0.5))
    placed_at = {}
    for second in range(1, 40):
        line.add(live(second + 1, INTERACTIVE, at=float(second)))
        found = line.take(FREE, float(second))
        assert found is not None
        placed_at[found[0].order] = second
    assert (placed_at[1], placed_at[0]) == (11, 21)


def test_with_one_class_the_order_of_arrival_is_all_that_counts() -> None:
    draw = random.Random("one class")
    for priority in Priority:
        lives = [live(order, priority, at=draw.uniform(0, 100)) for order in range(50)]
        line = line_of(*draw.sample(lives, 50))
        assert orders(line) == list(range(50))
        for one in draw.sample(lives, 20):
            line.remove(one)
            line.remove(one)
            line.add(one)
        assert taken(line) == list(range(50))


def test_one_that_comes_back_takes_its_old_place_in_its_class_and_passes_no_higher_class() -> None:
    lost = live(0, BATCH, at=0.0)
    lost.anew(Loss(Cause.LOST, WorkerId("d0"), ""), 500.0)
    waiting = [live(1, INTERACTIVE, at=499.0), live(2, BATCH, at=499.5), live(3, NORMAL, at=499.9)]
    line = line_of(*waiting, lost)
    assert orders(line) == [1, 3, 0, 2]
    line.add(live(4, NORMAL, at=509.4))
    line.add(live(5, NORMAL, at=509.6))
    assert orders(line) == [1, 3, 4, 0, 2, 5], "it goes before one that has waited since 499.5"


def test_the_order_is_that_of_arrival_in_each_class_whatever_comes_back() -> None:
    draw = random.Random("any")
    for _ in range(200):
        lives = [live(order, draw.choice(list(Priority)), at=order * 1.5) for order in range(30)]
        for one in draw.sample(lives, 10):
            one.anew(Loss(Cause.LOST, WorkerId("d0"), ""), 45.0 + draw.uniform(0, 30))
        line = line_of(*draw.sample(lives, 30))
        found = line.lives()
        assert sorted(one.order for one in found) == list(range(30))
        for priority in Priority:
            of_class = [one.order for one in found if one.facts.priority is priority]
            assert of_class == sorted(of_class)


def test_how_long_a_head_may_be_passed_is_counted_from_when_it_was_first_blocked() -> None:
    head, small = live(0, INTERACTIVE, prompt=600), live(1, INTERACTIVE, prompt=5)
    line = line_of(head)
    busy = Snapshot((PrefillView(WorkerId("p0"), 1000, 1000),), FREE.decode)
    assert line.take(busy, 7.0) is None
    assert head.blocked_since == 7.0
    line.add(small)
    found = line.take(busy, 7.0 + PASS_S - 0.1)
    assert found is not None
    assert found[0] is small
    line.add(small)
    assert line.take(busy, 7.0 + PASS_S) is None
    line.remove(head)
    line.add(head)
    assert head.blocked_since is None


def test_the_head_that_is_blocked_is_the_first_of_the_highest_class() -> None:
    low, high = live(0, BATCH, prompt=5), live(1, INTERACTIVE, prompt=600)
    line = line_of(low, high)
    busy = Snapshot((PrefillView(WorkerId("p0"), 1000, 1000),), FREE.decode)
    assert line.take(busy, 7.0) is None, "a smaller one of a lower class passes no head of a higher one"
    assert (high.blocked_since, low.blocked_since) == (7.0, None)
    assert line.take(FULL, 7.0) is None
