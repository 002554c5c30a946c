"""What all calls of the HTTP door share: the serving behind it, who may come in now, and how many are inside."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from opentelemetry.trace import TracerProvider
from prometheus_client.core import Metric

from coordinator.dispatch import Dispatcher
from coordinator.http.tracing import CallTracing
from coordinator.roster import Roster
from coordinator.serving import Serving
from kvrelay.errors import Unavailable
from kvrelay.requests import Role

BODIES_AT_ONCE = 32
"""Of the largest size: what may wait in memory of bodies that are not whole yet, over all connections."""


class Door:
    """collect: the coordinator's metrics. max_body_bytes: of one request."""

    def __init__(
        self,
        serving: Serving,
        dispatcher: Dispatcher,
        roster: Roster,
        collect: Callable[[], Iterable[Metric]],
        provider: TracerProvider,
        max_body_bytes: int,
    ) -> None:
        self.serving = serving
        self.collect = collect
        self.tracing = CallTracing(provider)
        self.max_body_bytes = max_body_bytes
        self.opened_at = int(time.time())
        self.draining = False
        self._dispatcher = dispatcher
        self._roster = roster
        self._num_running = 0
        self._num_coming = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def ready(self) -> bool:
        """A decode worker has a session: it can do everything."""
        return not self.draining and self._roster.has(Role.DECODE)

    def admit(self) -> None:
        """Raises what keeps every new request out, before anything is read of it."""
        if self.draining:
            raise Unavailable("the server is shutting down", retry_after_s=1.0)
        refusal = self._dispatcher.refusal()
        if refusal is not None:
            raise refusal

    def coming(self, num_bytes: int) -> None:
        """More of a body that is not whole yet is kept; `come` gives it back. Unavailable: there is no room for it."""
        if self._num_coming + num_bytes > BODIES_AT_ONCE * self.max_body_bytes:
            raise Unavailable("too many bytes of bodies are coming at once", retry_after_s=1.0)
        self._num_coming += num_bytes

    def come(self, num_bytes: int) -> None:
        """So much that `coming` took is not kept any more, or is whole."""
        self._num_coming -= num_bytes

    @contextmanager
    def running(self) -> Iterator[None]:
        self._num_running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_running -= 1
            if not self._num_running:
                self._idle.set()

    async def wait_idle(self) -> None:
        """Returns once no call runs."""
        await self._idle.wait()
