"""What a worker's cache did, numbered, for each open session until its next report. Pure; knows no reports.

Events are numbered from 1 on over the life of the process. A session that opens later, or that was told nothing for too
long, begins at the number that comes next: its reader sees that it missed some, and asks for the whole list.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from kvrelay.blocks import BlockEventKind, BlockEvents, BlockKey, BlockList, BlockRun
from kvrelay.requests import SessionId

MOST_KEYS = 4096
"""In one value: 128 KiB of them, and 160 KiB if each is a run of its own, are well under the size of a frame."""
MOST_WAITING = 65_536
"""Events that wait for one session. With more, all of them are dropped: the list is shorter than such a history."""
LATEST_S = 0.25
"""So long what the cache did waits for a report that has more to say."""


class CachedBlocks(Protocol):
    """What the engine's cache tells of itself, on the engine thread."""

    def take_events(self) -> tuple[BlockRun, ...]:
        """What happened since the last call, in order."""
        ...

    def keys(self) -> Sequence[BlockKey]:
        """All that is cached now."""
        ...


class _Waiting:
    """Events for one session, from number `first` on. since: when the oldest of them happened."""

    __slots__ = ("first", "num", "runs", "since")

    def __init__(self, first: int, since: float) -> None:
        self.first, self.since = first, since
        self.runs: list[BlockRun] = []
        self.num = 0


class CacheNews:
    """cache None: nothing is cached, and there is never any news."""

    def __init__(self, cache: CachedBlocks | None) -> None:
        self._cache = cache
        self._next = 1
        self._open: dict[SessionId, _Waiting | None] = {}

    def open(self, session: SessionId, now: float) -> None:
        """From here on it hears all; that others came before, it hears too, even if nothing follows."""
        self._open[session] = _Waiting(self._next, now) if self._next > 1 else None

    def close(self, session: SessionId) -> None:
        self._open.pop(session, None)

    def look(self, now: float) -> None:
        """Take what happened since the last look."""
        runs = self._cache.take_events() if self._cache is not None else ()
        if not runs:
            return
        first, num = self._next, sum(map(len, runs))
        self._next += num
        for session, before in self._open.items():
            waiting = before or _Waiting(first, now)
            if waiting.num + num > MOST_WAITING:
                waiting = _Waiting(self._next, waiting.since)
            else:
                waiting.runs += runs
                waiting.num += num
            self._open[session] = waiting

    def due(self, now: float) -> list[SessionId]:
        """Sessions whose news has waited long enough for a report of its own."""
        return [s for s, waiting in self._open.items() if waiting is not None and now >= waiting.since + LATEST_S]

    def next_due(self) -> float | None:
        since = [waiting.since for waiting in self._open.values() if waiting is not None]
        return min(since) + LATEST_S if since else None

    def take(self, session: SessionId) -> tuple[BlockEvents, ...]:
        """All that waits for it, in order."""
        waiting = self._open.get(session)
        if waiting is None:
            return ()
        self._open[session] = None
        return cut(waiting.first, waiting.runs)

    def whole(self, now: float) -> BlockList:
        """Everything cached now, and the number of the next event."""
        self.look(now)
        return BlockList(self._next, tuple(self._cache.keys()) if self._cache is not None else ())


def cut(first: int, runs: Sequence[BlockRun]) -> tuple[BlockEvents, ...]:
    """Runs as numbered values of at most MOST_KEYS events each; without any, one that says the number alone."""
    made: list[BlockEvents] = []
    page: list[BlockRun] = []
    room = MOST_KEYS
    for run in _joined(runs):
        for part in _parts(run, room):
            if len(part) > room:
                made.append(BlockEvents(first, tuple(page)))
                first, page, room = made[-1].next, [], MOST_KEYS
            page.append(part)
            room -= len(part)
    return (*made, BlockEvents(first, tuple(page)))


def _joined(runs: Sequence[BlockRun]) -> Iterator[BlockRun]:
    """Neighbours of one kind are one run: a step stores a block here and there."""
    kind, keys = BlockEventKind.CLEARED, list[BlockKey]()
    for run in runs:
        if run.kind is not kind and keys:
            yield BlockRun(kind, tuple(keys))
            keys = []
        kind = run.kind
        if kind is BlockEventKind.CLEARED:
            yield run
        else:
            keys += run.keys
    if keys:
        yield BlockRun(kind, tuple(keys))


def _parts(run: BlockRun, room: int) -> Iterator[BlockRun]:
    """The first part fills `room`, each later one a value of its own."""
    if len(run) <= room or not run.keys:
        yield run
        return
    if room:
        yield BlockRun(run.kind, run.keys[:room])
    for start in range(room, len(run.keys), MOST_KEYS):
        yield BlockRun(run.kind, run.keys[start : start + MOST_KEYS])
