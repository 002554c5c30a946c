"""Who may come in, and how long who waits may hope: limits, and roles that are without a worker. Knows no sessions.

A role whose last worker went is waited for: a restart within NO_WORKER_GRACE_S fails no request, new or open. A role
that never had a worker is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from kvrelay.config import CoordinatorConfig
from kvrelay.errors import ResourceExhausted, Unavailable
from kvrelay.requests import Role

NO_WORKER_GRACE_S = 4.0
RETRY_AFTER_S = 1.0


class Admission:
    def __init__(self, config: CoordinatorConfig) -> None:
        self._open_limit = config.open_limit
        self._queue_limit = config.queue_limit
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

    def hopeless(self, role: Role, now: float) -> bool:
        """Whether a request that needs this role waits for nothing."""
        return now - self._gone_at.get(role, math.inf) >= NO_WORKER_GRACE_S

    def check(self, needs_decode: bool, num_open: int, num_queued: int, now: float) -> None:
        """Raises at once what keeps a new request out: no worker, too many streams, a full queue."""
        for role in (Role.PREFILL, Role.DECODE) if needs_decode else (Role.PREFILL,):
            if self.hopeless(role, now):
                raise Unavailable(f"no {role} worker has a session here", retry_after_s=RETRY_AFTER_S)
        full = self.full(num_open, num_queued)
        if full is not None:
            raise full

    def full(self, num_open: int, num_queued: int) -> ResourceExhausted | None:
        """What keeps out any request, whatever it wants: too many streams, a full queue. None: there is room."""
        if num_open >= self._open_limit:
            message = f"{self._open_limit} requests are open; that is the limit"
        elif num_queued >= self._queue_limit:
            message = f"{self._queue_limit} requests wait already; that is the limit"
        else:
            return None
        return ResourceExhausted(message, retry_after_s=RETRY_AFTER_S)
