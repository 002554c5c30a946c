"""Who runs and who waits, in which order. Knows neither budgets nor the pool; the scheduler decides who moves."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import chain
from typing import Protocol, Self, TypeVar

from engine.sequence import SequenceState

MAX_PREEMPTIONS = 4
"""Preemptions after which a sequence is spared, unless nothing could run otherwise."""


class InTurn(Protocol):
    def goes_before(self, other: Self, /) -> bool: ...


T = TypeVar("T", bound=InTurn)


def line_up(queue: deque[T], one: T, keep: int = 0) -> int:
    """Behind all but those that it goes before, and behind the first `keep` anyhow; returns its place."""
    at = len(queue)
    while at > keep and one.goes_before(queue[at - 1]):
        at -= 1
    queue.insert(at, one)
    return at


class Queues:
    """Each sequence of a scheduler is in exactly one of the three."""

    def __init__(self) -> None:
        self.running: list[SequenceState] = []
        """By rank: of the highest class, the oldest first."""
        self.ready: deque[SequenceState] = deque()
        """Own blocks for all known tokens and wait only for a row. By turn."""
        self.waiting: deque[SequenceState] = deque()
        """Wait for blocks: by turn, but of each class preempted ones in front."""
        self.promised = 0
        """Blocks granted to running sequences and not taken by them yet."""

    def enter(self, seq: SequenceState, is_ready: bool) -> None:
        """A sequence that has come."""
        line_up(self.ready if is_ready else self.waiting, seq)

    def run(self, seq: SequenceState, promised: int) -> None:
        """Admit a sequence that was popped from its queue, with a promise of so many blocks."""
        seq.running = True
        seq.times_passed = 0
        seq.promised = promised
        self.promised += promised
        at = len(self.running)
        while at and self.running[at - 1].rank > seq.rank:
            at -= 1
        self.running.insert(at, seq)

    def fill_rows(self, max_sequences: int) -> None:
        """Those that wait for nothing else get the rows that are free."""
        while self.ready and len(self.running) < max_sequences:
            self.run(self.ready.popleft(), promised=0)

    def use_promise(self, seq: SequenceState, num_blocks: int) -> None:
        """Blocks it took count against its promise first."""
        used = min(seq.promised, num_blocks)
        seq.promised -= used
        self.promised -= used

    def remove(self, seq: SequenceState) -> None:
        """Take it out of whatever queue it is in; its promise is void."""
        if seq.running:
            self.running.remove(seq)
        elif seq in self.ready:
            self.ready.remove(seq)
        else:
            self.waiting.remove(seq)
        seq.running = False
        self.promised -= seq.promised
        seq.promised = 0

    def send_back(self, seq: SequenceState) -> None:
        """It lost its blocks: to the front of the waiting ones of its class, unless it has a place there."""
        if seq in self.waiting:
            return
        self.remove(seq)
        at = 0
        while at < len(self.waiting) and self.waiting[at].goes_before(seq):
            at += 1
        self.waiting.insert(at, seq)

    def victims(self, seq: SequenceState, last_resort: bool) -> Iterator[SequenceState]:
        """Running sequences of lower rank than seq that are in no plan, the lowest first: of the lowest class, the
        youngest. As a last resort also those preempted often, and those that wait with blocks, of no higher class."""
        younger = [s for s in reversed(self.running) if s.rank > seq.rank and not s.planned]
        yield from (s for s in younger if s.preemptions < MAX_PREEMPTIONS)
        if last_resort:
            yield from (s for s in younger if s.preemptions >= MAX_PREEMPTIONS)
            holders = [s for s in self.holders() if s is not seq and s.spec.priority <= seq.spec.priority]
            yield from sorted(holders, key=lambda s: -s.rank)

    def lead(self) -> SequenceState:
        """The first of the highest class of those that wait for blocks, moved to their front."""
        first = max(self.waiting, key=lambda s: s.spec.priority)
        if first is not self.waiting[0]:
            self.waiting.remove(first)
            self.waiting.appendleft(first)
        return first

    @property
    def inverted(self) -> bool:
        """Whether one that waits with blocks is of a higher class than all that run."""
        return bool(self.running) and any(s.spec.priority > self.running[0].spec.priority for s in self.holders())

    def holders(self) -> Iterator[SequenceState]:
        """Those that wait with blocks."""
        return (s for s in chain(self.ready, self.waiting) if s.block_ids)
