"""Who may come in, and how long who waits may hope: limits, and roles that are without a worker. Knows no sessions.

Decode workers alone can do everything, as they compute prompts where there is no prefill worker; prefill workers alone
can do what ends with its first token. A role whose last worker went is waited for: a restart within NO_WORKER_GRACE_S
fails no request, new or open. A role that never had a worker is not.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvrelay.config import CoordinatorConfig
from kvrelay.errors import ResourceExhausted, Unavailable
from kvrelay.requests import Role

NO_WORKER_GRACE_S = 4.0
RETRY_AFTER_S = 1.0


@dataclass(slots=True)
class Room:
    """What is kept free for requests that come in one after another. left: of them that are not in yet."""

    left: int


class Admission:
    def __init__(self, config: CoordinatorConfig, counters: Counter[str]) -> None:
        """counters: every request that found no room is counted in "refused"."""
        self._counters = counters
        self._open_limit = config.open_limit
        self._queue_limit = config.queue_limit
        self._kept = 0
        """Requests that room is kept for, of all who have any."""
        self._gone_at: dict[Role, float] = dict.fromkeys(Role, -math.inf)
        """Roles without a worker, and since when."""

    def look(self, has: Callable[[Role], bool], now: float) -> bool:
        """Notes which roles have a worker now. True if one has just lost its last."""
        just_gone = False
        for role in Role:
            if has(role):
                self._gone_at.pop(role, None)
            elif role not in self._gone_at:
                self._gone_at[role] = now
                just_gone = True
        return just_gone

    def hopeless(self, needs_decode: bool, now: float) -> str:
        """What such a request waits for in vain: `decode worker` or `worker`; empty while there is hope."""
        gone = {role for role, at in self._gone_at.items() if now - at >= NO_WORKER_GRACE_S}
        if gone == set(Role):
            return "worker"
        return "decode worker" if needs_decode and Role.DECODE in gone else ""

    @property
    def most_at_once(self) -> int:
        """Requests that can ever come in together: each may have to wait."""
        return min(self._open_limit, self._queue_limit)

    @contextmanager
    def room(self, count: int, num_open: int, num_queued: int) -> Iterator[Room]:
        """Keeps room for so many requests while they are taken in; ResourceExhausted at once if there is not enough."""
        full = self.full(num_open, num_queued, count)
        if full is not None:
            raise full
        room = Room(count)
        self._kept += count
        try:
            yield room
        finally:
            self._kept -= room.left
            room.left = 0

    def enter(self, room: Room) -> None:
        """One of those that room was kept for is in."""
        if room.left:
            room.left -= 1
            self._kept -= 1

    def check(self, needs_decode: bool, num_open: int, num_queued: int, now: float, room: Room | None = None) -> None:
        """Raises at once what keeps a new request out: no worker, or, if no room is kept, too many streams or a full
        queue."""
        missing = self.hopeless(needs_decode, now)
        if missing:
            raise Unavailable(f"no {missing} has a session here", retry_after_s=RETRY_AFTER_S)
        if room is not None and room.left:
            return
        full = self.full(num_open, num_queued)
        if full is not None:
            raise full

    def full(self, num_open: int, num_queued: int, count: int = 1) -> ResourceExhausted | None:
        """What keeps so many requests out, whatever they want: too many streams, a full queue. They count as refused.

        None: there is room.
        """
        more = self._kept + count
        if num_open + more > self._open_limit:
            name, most, state = "open_limit", self._open_limit, "are open"
        elif num_queued + more > self._queue_limit:
            name, most, state = "queue_limit", self._queue_limit, "wait already"
        else:
            return None
        self._counters["refused"] += count
        message = f"{most} requests {state}; that is the limit"
        if count > 1:
            message = f"too many requests {state} for {count} more at once; {most} is the limit"
        metadata = {"limit": name, "most": str(most)}
        return ResourceExhausted(message, retry_after_s=RETRY_AFTER_S, metadata=metadata)
