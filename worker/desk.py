"""What both roles' cores do alike: attempts by session, aborts and tombstones, endings, reports, load. Pure.

A core owns one desk; `drop` is its own way to let go of an attempt wherever it stands.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Generic

from engine.block_pool import BlockPool
from engine.events import Sampled
from engine.scheduler import Scheduler
from kvrelay.requests import SequenceKey
from kvrelay.session import Abort, Drain, Ended, Load, TokenOut
from kvtransfer.actions import Count
from worker.attempts import A, Attempts, key_of
from worker.events import Action, CommandReceived, Event, SendReport, SessionClosed, SessionOpened
from worker.outbox import Item, Outbox
from worker.throughput import Throughput


class Desk(Generic[A]):
    """actions: what the core wants done, besides reports, since they were last taken."""

    def __init__(self, drop: Callable[[A, float], None]) -> None:
        self.attempts: Attempts[A] = Attempts()
        self.actions: list[Action] = []
        self.counters: Counter[str] = Counter()
        self.throughput = Throughput()
        self.draining = False
        self.step_id = 0
        self._drop = drop
        self._outbox = Outbox()

    def handle(self, event: Event, now: float) -> None:
        """Sessions that open and close, and the commands that both roles take alike. Other events are ignored."""
        if isinstance(event, SessionOpened):
            self._outbox.open(event.session)
        elif isinstance(event, SessionClosed):
            for attempt in self.attempts.of_session(event.session):
                self._drop(attempt, now)
            self._outbox.close(event.session)
        elif isinstance(event, CommandReceived):
            if isinstance(event.command, Abort):
                self._abort(event, event.command, now)
            elif isinstance(event.command, Drain):
                self.draining = True

    def _abort(self, event: CommandReceived, command: Abort, now: float) -> None:
        key = key_of(event.session, command.request_id, command.attempt)
        attempt = self.attempts.get(key)
        if attempt is None:
            self.attempts.bury(key)
        else:
            self._drop(attempt, now)

    def is_news(self, key: SequenceKey) -> bool:
        """False for an attempt that is here already, or whose abort came first."""
        return not self.attempts.is_buried(key) and self.attempts.get(key) is None

    def tell(self, key: SequenceKey, item: Item) -> None:
        """Put an item into the next report of the session that the key belongs to."""
        self._outbox.add(key.session, item)

    def token(self, event: Sampled) -> None:
        key = event.key
        self.tell(key, TokenOut(key.request_id, key.attempt, key.sequence, event.index, event.token_id))

    def end(self, key: SequenceKey, reason: str, code: str = "", message: str = "") -> None:
        """Forget an attempt that holds nothing any more, and say so. One that is unknown has been told already."""
        if self.attempts.remove(key) is not None:
            self.tell(key, Ended(key.request_id, key.attempt, key.sequence, reason, code, message))

    def count(self, action: Count) -> None:
        self.counters[action.name] += action.by

    def expire(self, now: float) -> None:
        """Let go of every attempt whose deadline has passed."""
        for attempt in self.attempts.expired(now):
            key = attempt.key
            self._drop(attempt, now)
            ended = Ended(key.request_id, key.attempt, key.sequence, "failed", "DeadlineExceeded", "deadline passed")
            self.tell(key, ended)

    def take_actions(self, load: Load, now: float) -> list[Action]:
        """Everything collected, then one report for each session that has something to hear."""
        reports = self._outbox.drain(self.step_id, now, load)
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
