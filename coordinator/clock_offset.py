"""How far a worker's monotonic clock is from ours, by heartbeats that came back. Pure; it decides nothing.

Of the last round trips the shortest one counts: its middle is known best.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

KEPT = 32


class Offset(NamedTuple):
    """Worker's monotonic seconds + offset_s = ours, give or take error_s."""

    offset_s: float
    error_s: float


class ClockOffset:
    def __init__(self) -> None:
        self._sent: deque[tuple[int, float]] = deque(maxlen=KEPT)
        self._seen = 0
        self._trips: deque[tuple[float, float]] = deque(maxlen=KEPT)

    def sent(self, seq: int, now: float) -> None:
        self._sent.append((seq, now))

    def heard(self, seq: int, came_at_s: float, answered_at_s: float, now: float) -> None:
        """A report says that heartbeat `seq` came, and when it left itself, both on the worker's clock."""
        if seq <= self._seen or not came_at_s:
            return
        self._seen = seq
        sent_at = next((at for number, at in self._sent if number == seq), None)
        if sent_at is None:
            return
        trip = (now - sent_at) - (answered_at_s - came_at_s)
        offset = ((sent_at - came_at_s) + (now - answered_at_s)) / 2
        self._trips.append((max(0.0, trip), offset))

    def best(self) -> Offset | None:
        """None before the first round trip."""
        if not self._trips:
            return None
        trip, offset = min(self._trips)
        return Offset(offset, trip / 2)
