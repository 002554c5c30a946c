"""How a worker goes away: when it gives back what it still has, and when it may end. Pure: no sockets, threads, clocks.

1. Told to go, by SIGTERM or by a coordinator, it takes nothing new and gives back at once what it has not begun.
2. Until `move_at` what it has may end by itself: prompts, hand-offs in both directions, running sequences.
3. Then it gives back the rest, which the coordinator starts anew elsewhere; blocks on their way may still arrive.
4. With nothing left, or at `close_at`, its sessions end and the process with them.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.session import Load

MOVE_S = 2.0
"""So long before the end of the grace the rest is moved: others need some time to take it up, and writes to end."""
CLOSE_S = 0.75
"""So long before the end of the grace everything closes: sessions, engine, transport, server."""
SETTLE_S = 0.2
"""Nothing to do for so long: what the coordinators sent before they heard that the worker leaves would be here."""


@dataclass(frozen=True, slots=True)
class DrainTimes:
    """Monotonic seconds. A short grace is shared out: half of it at most for moving, a quarter for closing."""

    move_at: float
    close_at: float
    ends_at: float

    @classmethod
    def of(cls, grace_s: float, now: float) -> DrainTimes:
        ends_at = now + grace_s
        return cls(ends_at - min(MOVE_S, grace_s / 2), ends_at - min(CLOSE_S, grace_s / 4), ends_at)

    def sooner(self, earlier: DrainTimes | None) -> DrainTimes:
        """Told twice to go: the end that comes first counts."""
        return self if earlier is None or self.ends_at < earlier.ends_at else earlier


@dataclass(frozen=True, slots=True)
class Leaving:
    """The wait of a worker that goes. busy_at: when it was last seen with something to do."""

    times: DrainTimes
    busy_at: float

    def look(self, load: Load, num_sessions: int, now: float) -> tuple[Leaving, bool]:
        """To be called some ten times a second. Returns the new state and whether it is time to close everything.

        Without a session there is no request to wait for, but maybe a write. A load from before the engine heard of
        it (draining) says nothing: a step that began with it may take long, and what it computes is not in it yet.
        """
        busy_at = self.busy_at if load.draining and is_idle(load) else now
        after = Leaving(self.times, busy_at)
        if num_sessions == 0 and load.draining and is_quiet(load):
            return after, True
        return after, now >= self.times.close_at or now - busy_at >= SETTLE_S


def is_idle(load: Load) -> bool:
    """Nothing computed, waiting or on its way, and no block spoken for."""
    return is_quiet(load) and load.waiting == load.blocks.held == load.blocks.reserved == 0


def is_quiet(load: Load) -> bool:
    """Nothing computed or on its way."""
    return load.running == 0 and load.transfers_in_flight == 0
