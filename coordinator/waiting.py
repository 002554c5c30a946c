"""The requests that wait for a placement, in the order they came. Knows the router, no workers and no I/O."""

from __future__ import annotations

from bisect import insort

from coordinator.live import Live
from coordinator.router import LOOK_AHEAD, Routed, Rules, next_to_place
from coordinator.views import Snapshot


class WaitingLine:
    """A request that comes back (no room after all) takes its old place."""

    def __init__(self, rules: Rules) -> None:
        self._line: list[tuple[int, Live]] = []
        self._rules = rules

    def __len__(self) -> int:
        return len(self._line)

    def lives(self) -> list[Live]:
        return [live for _, live in self._line]

    def add(self, live: Live) -> None:
        live.blocked_since = None
        insort(self._line, (live.order, live))

    def remove(self, live: Live) -> None:
        """Nothing happens if it does not wait."""
        if self._line:
            self._line = [entry for entry in self._line if entry[1] is not live]

    def take(self, snapshot: Snapshot, now: float) -> tuple[Live, Routed] | None:
        """Removes and returns the request to place next, with its placement; None when nobody can be placed now."""
        wants = [live.want() for _, live in self._line[:LOOK_AHEAD]]
        found = next_to_place(wants, snapshot, now, self._rules)
        if found is None or found[0]:
            self._mark_blocked(now)
        if found is None:
            return None
        position, routed = found
        return self._line.pop(position)[1], routed

    def _mark_blocked(self, now: float) -> None:
        """The first request that could go but for lack of room; how long it may be passed is counted from here."""
        head = next((live for _, live in self._line if live.not_before <= now), None)
        if head is not None and head.blocked_since is None:
            head.blocked_since = now
