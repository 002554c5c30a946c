"""What both roles' cores do alike: attempts by session, aborts and tombstones, drain, endings, reports, load. Pure.

A core owns one desk. `drop` is its own way to let go of an attempt wherever it stands; `kept(attempt, moving)` says
whether a worker that drains keeps it: one that has begun, and at the end of the grace (moving) hardly any.
An attempt is kept under the key of its sequence 0. If it runs as several sequences, `drop_sequence` lets go of one of
them, and `open_sequences` names those that are not over: each gets an ending of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Generic

from engine.block_pool import BlockPool
from engine.events import Sampled
from engine.scheduler import Scheduler
from kvrelay.errors import KVRelayError
from kvrelay.requests import SequenceKey
from kvrelay.session import Abort, Drain, Ended, Load, TokenOut
from kvtransfer.actions import Count
from worker.attempts import A, Attempts, key_of, whole
from worker.cache_news import CachedBlocks, CacheNews
from worker.drain import DrainTimes
from worker.events import (
    Action,
    BlocksAsked,
    BlocksListed,
    CommandReceived,
    DrainAsked,
    Event,
    Leave,
    SendReport,
    SessionClosed,
    SessionOpened,
)
from worker.outbox import Item, Outbox
from worker.step_notes import StepNotes
from worker.throughput import Throughput

PAUSE_S = 2.0
"""Turns come twice a second at least. After a longer gap, a step or a pause of the process, waiting counts anew."""
TOLD_FROM_THE_START = ("matched_tokens", "preempted", "quarantined")
"""Counters that are there with 0; others come with their first."""


class Desk(Generic[A]):
    """actions: what the core wants done, besides reports, since they were last taken. cache: None without one."""

    def __init__(
        self,
        drop: Callable[[A, float], None],
        kept: Callable[[A, bool], bool],
        *,
        drop_sequence: Callable[[A, int, float], None] | None = None,
        open_sequences: Callable[[A], Iterable[int]] = lambda _: (0,),
        cache: CachedBlocks | None = None,
    ) -> None:
        self.attempts: Attempts[A] = Attempts()
        self.actions: list[Action] = []
        self.counters: Counter[str] = Counter(dict.fromkeys(TOLD_FROM_THE_START, 0))
        self.throughput = Throughput()
        self.step_id = 0
        self._drop = drop
        self._kept = kept
        self._drop_sequence = drop_sequence
        self._open_sequences = open_sequences
        self._drain: DrainTimes | None = None
        self._has_moved = False
        self._moved_at = self._asked_at = 0.0
        self._outbox = Outbox()
        self._news = CacheNews(cache)
        self.steps = StepNotes()

    @property
    def draining(self) -> bool:
        return self._drain is not None

    def handle(self, event: Event, now: float) -> None:
        """Sessions that open and close, and the commands that both roles take alike. Other events are ignored."""
        if isinstance(event, SessionOpened):
            self._outbox.open(event.session)
            self._news.open(event.session, now)
            if event.steps:
                self.steps.open(event.session)
        elif isinstance(event, SessionClosed):
            for attempt in self.attempts.of_session(event.session):
                self._drop(attempt, now)
            self._outbox.close(event.session)
            self._news.close(event.session)
            self.steps.close(event.session)
        elif isinstance(event, CommandReceived):
            if isinstance(event.command, Abort):
                self._abort(event, event.command, now)
            elif isinstance(event.command, Drain):
                self._begin_drain(event.command.grace_s, now)
        elif isinstance(event, BlocksAsked):
            self.actions.append(BlocksListed(event.token, self._news.whole(now)))
        elif isinstance(event, DrainAsked):
            self._begin_drain(event.grace_s, now)

    def _abort(self, event: CommandReceived, command: Abort, now: float) -> None:
        key = key_of(event.session, command.request_id, command.attempt)
        attempt = self.attempts.get(key)
        if attempt is None:
            if command.sequence is None:  # one sequence is told to end only after the attempt has begun
                self.attempts.bury(key)
        elif command.sequence is None or self._drop_sequence is None:
            self._drop(attempt, now)
        else:
            self._drop_sequence(attempt, command.sequence, now)

    def _begin_drain(self, grace_s: float, now: float) -> None:
        """What has not begun is given back at once, so that another worker takes it up soon."""
        self._drain = DrainTimes.of(grace_s, now).sooner(self._drain)
        self._give_back(moving=False, now=now)
        self._outbox.tell_all()
        self.actions.append(Leave(grace_s))

    def _give_back(self, moving: bool, now: float) -> None:
        for attempt in self.attempts:
            if not self._kept(attempt, moving):
                self.counters["moved" if moving else "given_back"] += 1
                self._drop_failed(attempt, "Unavailable", "draining: moved" if moving else "draining", now)

    def _move_rest(self, now: float) -> None:
        """The grace is nearly over: another worker goes on with what is left."""
        if self._drain is not None and not self._has_moved and now >= self._drain.move_at:
            self._has_moved = True
            self._give_back(moving=True, now=now)

    def next_due(self) -> float | None:
        """When `expire` has something to do, or a report for what the cache did."""
        move_at = None if self._drain is None or self._has_moved else self._drain.move_at
        due = [at for at in (move_at, self.attempts.next_deadline(), self._news.next_due()) if at is not None]
        return min(due, default=None)

    def is_news(self, key: SequenceKey) -> bool:
        """False for an attempt that is here already, or whose abort came first."""
        return not self.attempts.is_buried(key) and self.attempts.get(key) is None

    def tell(self, key: SequenceKey, item: Item) -> None:
        """Put an item into the next report of the session that the key belongs to."""
        self._outbox.add(key.session, item)

    def token(self, event: Sampled) -> None:
        key = event.key
        out = TokenOut(key.request_id, key.attempt, key.sequence, event.index, event.token_id, event.logprobs)
        self.tell(key, out)

    def end(self, key: SequenceKey, reason: str, code: str = "", message: str = "") -> None:
        """Forget an attempt that holds nothing any more, and say so. One that is unknown has been told already."""
        attempt = self.attempts.remove(whole(key))
        if attempt is not None:
            self._tell_ended(key, tuple(self._open_sequences(attempt)), reason, code, message)

    def end_sequence(self, key: SequenceKey, reason: str, code: str = "", message: str = "") -> None:
        """Say that one sequence is over while its attempt lives on. Of an unknown attempt all has been told already."""
        if self.attempts.get(whole(key)) is not None:
            self._tell_ended(key, (key.sequence,), reason, code, message)

    def fail(self, key: SequenceKey, error: type[KVRelayError], message: str, now: float) -> None:
        """One sequence cannot go on, by the request's own fault: all n of its attempt end, for their stream does."""
        attempt = self.attempts.get(whole(key))
        if attempt is not None:
            self._drop_failed(attempt, error.__name__, message, now)

    def _tell_ended(
        self, key: SequenceKey, sequences: tuple[int, ...], reason: str, code: str = "", message: str = ""
    ) -> None:
        for sequence in sequences:
            self.tell(key, Ended(key.request_id, key.attempt, sequence, reason, code, message))

    def _drop_failed(self, attempt: A, code: str, message: str, now: float) -> None:
        sequences = tuple(self._open_sequences(attempt))
        self._drop(attempt, now)
        self._tell_ended(attempt.key, sequences, "failed", code, message)

    def count(self, action: Count) -> None:
        self.counters[action.name] += action.by

    def expire(self, now: float) -> None:
        """Let go of every attempt whose deadline has passed, and of what a worker that drains may not keep longer."""
        self._move_rest(now)
        for attempt in self.attempts.expired(now):
            self._drop_failed(attempt, "DeadlineExceeded", "deadline passed", now)

    def moved(self, now: float) -> None:
        """A token was computed, or a block arrived or left."""
        self._moved_at = now

    def stuck_s(self, has_work: bool, now: float) -> float:
        """Seconds without a move while there was work. To be asked at every turn; a long silence was our own pause."""
        if not has_work or now - self._asked_at > PAUSE_S:
            self._moved_at = now
        self._asked_at = now
        return now - self._moved_at

    def take_actions(self, load: Load, now: float) -> list[Action]:
        """Everything collected, then one report for each session that has something to hear.

        What the cache did goes with it; alone it makes a report only once it has waited for one.
        """
        self._news.look(now)
        if not self.steps.record(load, self.counters["preempted"], now):
            self.counters["steps_untold"] += 1
        for session in dict.fromkeys((*self._outbox.speaking(), *self._news.due(now))):
            for events in self._news.take(session):
                self._outbox.add(session, events)
        reports = self._outbox.drain(self.step_id, now, load, self.steps.take)
        actions, self.actions = self.actions, []
        return [*actions, *(SendReport(session, report) for session, report in reports)]

    def load(self, pool: BlockPool, scheduler: Scheduler, waiting: int, in_flight: int, now: float) -> Load:
        return Load(
            blocks=pool.counts(),
            running=scheduler.num_running,
            waiting=waiting + scheduler.num_waiting,
            queued_tokens=scheduler.queued_tokens,
            transfers_in_flight=in_flight,
            tokens_per_s=self.throughput.per_s(now),
            draining=self.draining,
            counters=tuple(sorted(self.counters.items())),
        )
