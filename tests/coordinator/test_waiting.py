"""Who of those that wait goes first: by class, by arrival, and by how long they have waited. What a burst costs."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from support.lifecycles import facts

from coordinator import passing
from coordinator.admission import Admission
from coordinator.events import Cause, Loss
from coordinator.live import Attempt, Live, Times
from coordinator.output import OutputText
from coordinator.passing import LOOK_AHEAD, PASS_S
from coordinator.placing import Placing
from coordinator.router import Routed, Rules, route
from coordinator.states import State
from coordinator.stream import StreamBuffer
from coordinator.text import ByteCodec
from coordinator.views import DecodeView, PrefillView, Snapshot, Want
from coordinator.waiting import AGE_S, WaitingLine
from kvrelay.config import CoordinatorConfig
from kvrelay.requests import Priority, RequestId, Role, WorkerId

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


def blocked_line(draw: random.Random) -> tuple[WaitingLine, Snapshot]:
    """Some that wait, none of whom can be placed."""
    line = WaitingLine(Rules())
    for order in range(draw.randrange(1, 8)):
        line.add(live(order, draw.choice(list(Priority)), at=order / 10, prompt=draw.randrange(1, 900)))
    ticketed = draw.choice([0, 900, 1000])
    decode = DecodeView(WorkerId("d0"), "d0:1", 5, 8, draw.randrange(60), 100)
    busy = Snapshot((PrefillView(WorkerId("p0"), ticketed, ticketed),), (decode,) * draw.randrange(2))
    while line.take(busy, 5.0) is not None:
        pass
    return line, busy


def test_a_newcomer_is_placed_where_a_look_at_the_whole_line_would_place_it() -> None:
    draw, placed = random.Random("newcomers"), 0
    for _ in range(150):
        seed = draw.random()
        both = [blocked_line(random.Random(seed)) for _ in range(2)]
        now = 5.0 + draw.choice([0.0, PASS_S])
        priority, prompt = draw.choice(list(Priority)), draw.choice([5, 100, draw.randrange(1, 900)])
        found = []
        for (line, busy), all_of_it in zip(both, (True, False), strict=True):
            while line.take(busy, now) is not None:
                pass  # some may go now that the first has waited for long
            newcomer = live(100, priority, at=now, prompt=prompt)
            line.add(newcomer)
            one = line.take(busy, now) if all_of_it else line.take_newcomer(newcomer, busy, now)
            found.append(None if one is None else (one[0].order, one[1]))
        assert found[0] == found[1]
        placed += found[0] is not None
    assert placed > 10, "the lines are such that some newcomers go"


class Workers:
    """Just what Placing asks of a roster; nobody has room."""

    def __init__(self) -> None:
        self.snapshots = 0

    def snapshot(self) -> Snapshot:
        self.snapshots += 1
        return FULL

    def has(self, role: Role) -> bool:
        return True


def test_a_burst_behind_a_full_line_asks_the_router_twice_for_each_that_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, wants, workers = Counter[str](), Live.want, Workers()

    def routed(snapshot: Snapshot, want: Want, rules: Rules) -> Routed | None:
        asked["router"] += 1
        return route(snapshot, want, rules)

    def wanted(one: Live) -> Want:
        asked["want"] += 1
        return wants(one)

    monkeypatch.setattr(passing, "route", routed)
    monkeypatch.setattr(Live, "want", wanted)
    placing = Placing(workers, WaitingLine(Rules()), Admission(CoordinatorConfig(), Counter()), pytest.fail)  # type: ignore[arg-type]
    for order in range(300):
        placing.add(live(order, prompt=300 - order))
    assert workers.snapshots == LOOK_AHEAD, "those further behind are not looked at"
    assert asked == {"router": 2 * LOOK_AHEAD - 1, "want": 301}, "of the first twice: it is blocked from then on"


def test_one_that_moved_waits_once_and_is_placed_once() -> None:
    moved = live(0)
    moved.state = replace(moved.state, attempt=1)
    line = line_of(moved, live(1))
    assert orders(line) == [0, 1]
    assert taken(line) == [0, 1]
