"""The requests that wait for a placement, and who of them goes first. Knows the router, no workers and no I/O."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, islice
from operator import attrgetter

from coordinator.live import Live
from coordinator.passing import LOOK_AHEAD, next_to_place
from coordinator.router import Routed, Rules
from coordinator.views import Snapshot, Want
from kvrelay.requests import Priority

AGE_S = 10.0
"""Waiting so long counts as much as a class of priority: later requests of the next class go first if they come before
so long has passed, those of the class above it for twice as long, and then nobody does."""


@dataclass(slots=True)
class _Entry:
    """order: place among those of its class. since: when it would have had to come to wait where it does without
    classes, on the loop's clock; smaller ones go first. Within a class it never falls.

    want: what the router is asked; while it waits, nothing of it changes but blocked_since. Kept, as every look at the
    line asks for those of LOOK_AHEAD requests.
    """

    order: int
    since: float
    live: Live
    want: Want


class WaitingLine:
    """Who came first goes first, where a class of priority counts as much as AGE_S of waiting.

    A request that comes back (no room after all, or its worker was lost) takes its old place in its class. Towards
    other classes only that time counts which it has waited now, or which those have that it goes before.
    """

    def __init__(self, rules: Rules) -> None:
        self._lines: dict[Priority, list[_Entry]] = {priority: [] for priority in Priority}
        self._rules = rules

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def lives(self) -> list[Live]:
        return [entry.live for entry in self._in_order()]

    def add(self, live: Live) -> None:
        live.blocked_since = None
        line = self._lines[live.facts.priority]
        at = bisect_left(line, live.order, key=attrgetter("order"))
        since = live.attempt.queued_at - AGE_S * live.facts.priority
        if at < len(line):
            since = min(since, line[at].since)
        if at:
            since = max(since, line[at - 1].since)
        line.insert(at, _Entry(live.order, since, live, live.want()))

    def remove(self, live: Live) -> None:
        """Nothing happens if it does not wait."""
        line = self._lines[live.facts.priority]
        at = bisect_left(line, live.order, key=attrgetter("order"))
        if at < len(line) and line[at].live is live:
            del line[at]

    def take(self, snapshot: Snapshot, now: float) -> tuple[Live, Routed] | None:
        """Removes and returns the request to place next, with its placement; None when nobody can be placed now."""
        return self._take(list(islice(self._in_order(), LOOK_AHEAD)), snapshot, now)

    def take_newcomer(self, newcomer: Live, snapshot: Snapshot, now: float) -> tuple[Live, Routed] | None:
        """As `take`, where nobody could be placed before this one came and nothing else has changed.

        The others are looked at only if it goes before them: their answers depend on who is the first.
        """
        ready = [e for e in islice(self._in_order(), LOOK_AHEAD) if e.want.not_before <= now]
        if ready and ready[0].live is not newcomer:
            ready = [ready[0], *(entry for entry in ready if entry.live is newcomer)]
        return self._take(ready, snapshot, now)

    def stumbled_over(self, snapshot: Snapshot, now: float) -> Live | None:
        """Of those that were looked at when that raised: whoever raises alone as well, or else the first."""
        looked_at = list(islice(self._in_order(), LOOK_AHEAD))
        for entry in looked_at:
            try:
                next_to_place([entry.want], snapshot, now, self._rules)
            except Exception:
                return entry.live
        return looked_at[0].live if looked_at else None

    def is_far_behind(self, live: Live) -> bool:
        """Whether it waits behind so many that nobody looks at it."""
        return len(self) > LOOK_AHEAD and all(e.live is not live for e in islice(self._in_order(), LOOK_AHEAD))

    def _take(self, looked_at: list[_Entry], snapshot: Snapshot, now: float) -> tuple[Live, Routed] | None:
        found = next_to_place([entry.want for entry in looked_at], snapshot, now, self._rules)
        if found is None or found[0]:
            self._mark_blocked(now)
        if found is None:
            return None
        position, routed = found
        self.remove(looked_at[position].live)
        return looked_at[position].live, routed

    def _in_order(self) -> Iterable[_Entry]:
        """All classes, who goes first first."""
        lines = [line for line in self._lines.values() if line]
        return heapq.merge(*lines, key=attrgetter("since", "order")) if len(lines) > 1 else chain(*lines)

    def _mark_blocked(self, now: float) -> None:
        """The first request that could go but for lack of room; how long it may be passed is counted from here."""
        head = next((entry for entry in self._in_order() if entry.want.not_before <= now), None)
        if head is not None and head.want.blocked_since is None:
            head.live.blocked_since = now
            head.want = head.live.want()
