"""The engine thread's only door: a bounded mailbox that any thread may post to. Knows nothing of what is in it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class MailboxFull(Exception):
    """The engine thread did not empty its mailbox in time: it is stuck, or someone posts without waiting for room."""


class Mailbox(Generic[T]):
    """Many threads post, one takes. `limit` bounds the number of events, whatever their kind.

    Who posts bulk data asks `has_room` first and, without room, leaves a callback with `when_taken`; control events
    are few and are always taken, up to the limit.
    """

    def __init__(self, limit: int = 65_536, bulk_limit_bytes: int = 32 * 1024 * 1024) -> None:
        self._limit = limit
        self._bulk_limit = bulk_limit_bytes
        self._condition = threading.Condition()
        self._events: deque[T] = deque()
        self._bulk_bytes = 0
        self._waiters: list[Callable[[], None]] = []
        self._closed = False

    def post(self, event: T, bulk_bytes: int = 0, *, must: bool = False) -> None:
        """Never blocks. Raises MailboxFull over the limit; after `close` events are dropped.

        must: an ending, of which there is one for each thing that began; the limit does not keep it out.
        """
        with self._condition:
            if self._closed:
                return
            if not must and len(self._events) >= self._limit:
                raise MailboxFull(f"{self._limit} events wait for the engine thread")
            self._events.append(event)
            self._bulk_bytes += bulk_bytes
            self._condition.notify()

    def has_room(self) -> bool:
        """Whether another piece of bulk data may be posted."""
        with self._condition:
            return self._closed or self._bulk_bytes < self._bulk_limit

    def when_taken(self, callback: Callable[[], None]) -> None:
        """Call back once, from the taking thread, after the mailbox was emptied next (at once if it is empty)."""
        with self._condition:
            if self._events and not self._closed:
                self._waiters.append(callback)
                return
        callback()

    def take(self, timeout: float | None) -> list[T]:
        """Everything posted so far, in order; waits up to `timeout` seconds (None: until something comes) if empty."""
        with self._condition:
            if not self._events and not self._closed and timeout != 0:
                self._condition.wait(timeout)
            events = list(self._events)
            self._events.clear()
            self._bulk_bytes = 0
            waiters, self._waiters = self._waiters, []
        for callback in waiters:
            callback()
        return events

    def close(self) -> None:
        """Wakes the taker; later posts are dropped."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
            waiters, self._waiters = self._waiters, []
        for callback in waiters:
            callback()
