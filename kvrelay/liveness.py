"""When is a silent peer gone, and how long is long enough? Pure: time counts only while one's own timer was on time."""

from __future__ import annotations

from dataclasses import dataclass, replace

MAX_LAG_S = 0.5
"""A timer that fires later than this was held up by one's own pause; what was not heard meanwhile proves nothing."""


@dataclass(frozen=True, slots=True)
class Liveness:
    """heard_at: when the peer was last heard; checked_at: when `check` last ran. Monotonic seconds."""

    gives_up_s: float
    heard_at: float
    checked_at: float

    @classmethod
    def start(cls, gives_up_s: float, now: float) -> Liveness:
        return cls(gives_up_s, now, now)

    def heard(self, now: float) -> Liveness:
        return replace(self, heard_at=now)

    def silent_s(self, now: float) -> float:
        return now - self.heard_at

    def check(self, now: float, interval_s: float) -> tuple[Liveness, bool]:
        """Run every `interval_s`. Returns the new state and whether the peer is gone."""
        late = now - self.checked_at - interval_s > MAX_LAG_S
        heard_at = now if late else self.heard_at
        return replace(self, heard_at=heard_at, checked_at=now), now - heard_at >= self.gives_up_s


MAX_UNSEEN_S = 1.0
"""So much of the time between two looks counts at most: the rest was our own pause, or a leap of the clock."""


class SteadyClock:
    """Time that passed while we looked, for waits that prove something about others by their length.

    Looked at once a second or more often it runs like `now`; a leap of `now` by a minute is a second to it.
    """

    __slots__ = ("_last", "_steady")

    def __init__(self) -> None:
        self._last: float | None = None
        self._steady = 0.0

    def at(self, now: float) -> float:
        """The time by this clock, on the scale of the first `now`."""
        if self._last is None:
            self._steady = now
        else:
            self._steady += min(max(0.0, now - self._last), MAX_UNSEEN_S)
        self._last = now
        return self._steady

    def when(self, steady: float) -> float:
        """The earliest `now` at which this clock can show `steady`."""
        return steady + (0.0 if self._last is None else self._last - self._steady)
