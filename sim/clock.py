"""Virtual time: an event loop per node that never waits, and time.monotonic as the node that runs now sees it.

Nodes are processes of the simulated cluster. Each has a clock of its own (origin, rate, jumps), since no two processes
agree on the time; code under test reads it through its loop and through time.monotonic.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class _NoSelector:
    """There is nothing to wait for: the world decides when a loop runs."""

    def select(self, timeout: float | None = None) -> list[Any]:
        return []

    def close(self) -> None:
        pass


class VirtualLoop(asyncio.BaseEventLoop):
    """Runs one pass of its callbacks per `step`; `clock` is its time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self._clock = clock
        self._selector = _NoSelector()
        self._clock_resolution = 0.0  # a timer that fires a moment early would find that its time has not come
        self.failures: list[dict[str, Any]] = []
        self.set_exception_handler(lambda _, context: self.failures.append(context))

    def time(self) -> float:
        return self._clock()

    def step(self) -> None:
        """Every callback that is ready now, once; what they make ready waits for the next step."""
        asyncio._set_running_loop(self)
        try:
            self._run_once()  # type: ignore[attr-defined]  # BaseEventLoop's own pass
        finally:
            asyncio._set_running_loop(None)

    def has_ready(self) -> bool:
        return bool(self._ready)  # type: ignore[attr-defined]

    def __del__(self) -> None:
        """Nothing to close: it never opened anything."""

    def drop_all(self) -> None:
        """Forget everything that was to run."""
        self._ready.clear()  # type: ignore[attr-defined]
        self._scheduled.clear()  # type: ignore[attr-defined]

    def next_due(self) -> float | None:
        """When the next timer is due, on this loop's clock."""
        scheduled = self._scheduled  # type: ignore[attr-defined]
        while scheduled and scheduled[0]._cancelled:
            handle = heapq.heappop(scheduled)
            handle._scheduled = False
            self._timer_cancelled_count -= 1  # type: ignore[attr-defined]  # as BaseEventLoop counts them
        return scheduled[0]._when if scheduled else None

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass


@contextmanager
def instead_of_monotonic(clock: Callable[[], float]) -> Iterator[None]:
    """time.monotonic() is `clock()` inside the block. Nothing else may run in this process meanwhile."""
    real = time.monotonic
    time.monotonic = clock
    try:
        yield
    finally:
        time.monotonic = real
