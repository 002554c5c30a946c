"""Who runs and who waits, in which order. Knows neither budgets nor the pool; the scheduler decides who moves."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import chain

from engine.sequence import SequenceState

MAX_PREEMPTIONS = 4
"""Preemptions after which a sequence is spared, unless nothing could run otherwise."""


class Queues:
    """Each sequence of a scheduler is in exactly one of the three."""

    def __init__(self) -> None:
        self.running: list[SequenceState] = []
        """Oldest first."""
        self.ready: deque[SequenceState] = deque()
        """Own blocks for all known tokens and wait only for a row."""
        self.waiting: deque[SequenceState] = deque()
        """Wait for blocks: preempted ones in front, then in order of arrival."""
        self.promised = 0
        """Blocks granted to running sequences and not taken by them yet."""

    def run(self, seq: SequenceState, promised: int) -> None:
        """Admit a sequence that was popped from its queue, with a promise of so many blocks."""
        seq.running = True
        seq.times_passed = 0
        seq.promised = promised
        self.promised += promised
        at = len(self.running)
        while at and self.running[at - 1].arrival > seq.arrival:
            at -= 1
        self.running.insert(at, seq)

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
        """It lost its blocks: to the front of the waiting ones, unless it has a place there."""
        if seq in self.waiting:
            return
        self.remove(seq)
        self.waiting.appendleft(seq)

    def victims(self, seq: SequenceState, last_resort: bool) -> Iterator[SequenceState]:
        """Running sequences younger than seq that are in no plan, youngest first; as a last resort also those
        preempted often, and those that wait with blocks."""
        younger = [s for s in reversed(self.running) if s.arrival > seq.arrival and not s.planned]
        yield from (s for s in younger if s.preemptions < MAX_PREEMPTIONS)
        if last_resort:
            yield from (s for s in younger if s.preemptions >= MAX_PREEMPTIONS)
            holders = [s for s in chain(self.ready, self.waiting) if s.block_ids and s is not seq]
            yield from sorted(holders, key=lambda s: -s.arrival)
