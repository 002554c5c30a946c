"""When a silent worker is given up: pure. Silence counts only while our own timer was on time."""

from __future__ import annotations

from dataclasses import dataclass, replace

LAG_S = 0.5
"""A timer later than this means that we stood still ourselves: what was not heard meanwhile proves nothing."""


@dataclass(frozen=True, slots=True)
class Window:
    """heard_at: the worker's last sign, or the end of our own pause. checked_at: when `check` last ran."""

    heard_at: float
    checked_at: float

    def silent_s(self, now: float) -> float:
        return now - self.heard_at


def heard(window: Window, now: float) -> Window:
    return replace(window, heard_at=now)


def check(window: Window, now: float, interval_s: float, gives_up_s: float) -> tuple[Window, bool]:
    """Run every `interval_s`. Returns the new window and whether the worker is to be given up."""
    late = now - window.checked_at - interval_s > LAG_S
    heard_at = now if late else window.heard_at
    return Window(heard_at, now), now - heard_at >= gives_up_s
