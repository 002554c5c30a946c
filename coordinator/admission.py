"""Who may come in, and how long who waits may hope: limits, and roles that are without a worker. Knows no sessions.

Decode workers alone can do everything, as they compute prompts where there is no prefill worker; prefill workers alone
can do what ends with its first token. A role whose last worker went is waited for: a restart within NO_WORKER_GRACE_S
fails no request, new or open. A role that never had a worker is not.
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

    def hopeless(self, needs_decode: bool, now: float) -> str:
        """What such a request waits for in vain: `decode worker` or `worker`; empty while there is hope."""
        gone = {role for role, at in self._gone_at.items() if now - at >= NO_WORKER_GRACE_S}
        if gone == set(Role):
            return "worker"
        return "decode worker" if needs_decode and Role.DECODE in gone else ""

    def check(self, needs_decode: bool, num_open: int, num_queued: int, now: float) -> None:
        """Raises at once what keeps a new request out: no worker, too many streams, a full queue."""
        missing = self.hopeless(needs_decode, now)
        if missing:
            raise Unavailable(f"no {missing} has a session here", retry_after_s=RETRY_AFTER_S)
        full = self.full(num_open, num_queued)
        if full is not None:
            raise full

    def full(self, num_open: int, num_queued: int) -> ResourceExhausted | None:
        """What keeps out any request, whatever it wants: too many streams, a full queue. None: there is room."""
        if num_open >= self._open_limit:
            name, most, message = "open_limit", self._open_limit, "requests are open; that is the limit"
        elif num_queued >= self._queue_limit:
            name, most, message = "queue_limit", self._queue_limit, "requests wait already; that is the limit"
        else:
            return None
        metadata = {"limit": name, "most": str(most)}
        return ResourceExhausted(f"{most} {message}", retry_after_s=RETRY_AFTER_S, metadata=metadata)
