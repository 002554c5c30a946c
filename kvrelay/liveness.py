"""When is a silent peer gone? Pure: silence counts only while one's own timer was on time."""

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
