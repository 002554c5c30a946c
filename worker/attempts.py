"""The attempts a worker knows: live ones by key, deadlines, and tombstones of those aborted before they came. Pure."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

from kvrelay.requests import RequestId, SequenceKey, SessionId
from kvrelay.session import Work

MAX_TOMBSTONES = 4096
SPARE_DEADLINES = 1024
"""Deadlines of ended attempts that may be kept, beside as many as there are live ones."""


class HasWork(Protocol):
    @property
    def key(self) -> SequenceKey: ...

    @property
    def work(self) -> Work: ...


A = TypeVar("A", bound=HasWork)


def key_of(session: SessionId, request_id: RequestId, attempt: int) -> SequenceKey:
    """Keys hold the session: ids of another coordinator, or of an earlier session, never meet."""
    return SequenceKey(session, request_id, attempt)


def whole(key: SequenceKey) -> SequenceKey:
    """The key that the attempt of a sequence is kept under: that of its sequence 0."""
    return key if key.sequence == 0 else replace(key, sequence=0)


class Attempts(Generic[A]):
    """Live attempts of one worker. Deadlines are a backstop: the coordinator enforces its own a second earlier."""

    def __init__(self) -> None:
        self._live: dict[SequenceKey, A] = {}
        self._deadlines: list[tuple[float, int, SequenceKey]] = []
        self._num_deadlines = 0
        self._tombstones: OrderedDict[SequenceKey, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[A]:
        return iter(tuple(self._live.values()))

    def get(self, key: SequenceKey) -> A | None:
        return self._live.get(key)

    def add(self, attempt: A, now: float) -> None:
        key = attempt.key
        assert key not in self._live, f"{key} is already here"
        self._live[key] = attempt
        if attempt.work.deadline_s is not None:
            self._num_deadlines += 1
            heapq.heappush(self._deadlines, (now + attempt.work.deadline_s, self._num_deadlines, key))
            if len(self._deadlines) > 2 * len(self._live) + SPARE_DEADLINES:
                self._forget_deadlines()

    def _forget_deadlines(self) -> None:
        """Those of attempts that have ended: an hour's deadline would else outlive its request by an hour."""
        self._deadlines = [entry for entry in self._deadlines if entry[2] in self._live]
        heapq.heapify(self._deadlines)

    def remove(self, key: SequenceKey) -> A | None:
        return self._live.pop(key, None)

    def of_session(self, session: SessionId) -> list[A]:
        return [a for a in self._live.values() if a.key.session == session]

    def bury(self, key: SequenceKey) -> None:
        """An abort overtook its request: remember it, so that the request is not begun when it comes."""
        self._tombstones[key] = None
        while len(self._tombstones) > MAX_TOMBSTONES:
            self._tombstones.popitem(last=False)

    def is_buried(self, key: SequenceKey) -> bool:
        return key in self._tombstones

    def expired(self, now: float) -> list[A]:
        """Live attempts whose deadline has passed; each is named once."""
        due = []
        while self._deadlines and self._deadlines[0][0] <= now:
            attempt = self._live.get(heapq.heappop(self._deadlines)[2])
            if attempt is not None:
                due.append(attempt)
        return due

    def next_deadline(self) -> float | None:
        return self._deadlines[0][0] if self._deadlines else None
