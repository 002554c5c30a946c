"""A whole engine in one call chain: the reference that split serving is compared with. Knows no threads, no wire."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from engine.events import Event, Failed, Sampled
from engine.executor import Executor
from engine.scheduler import Scheduler
from kvrelay.errors import InvalidArgument
from kvrelay.requests import SequenceKey, SequenceSpec


class LocalEngine:
    """schedule, run, apply. The caller owns the executor and closes it; blocks belong to the scheduler."""

    def __init__(self, executor: Executor, scheduler: Scheduler) -> None:
        self.executor = executor
        self.scheduler = scheduler

    def add(self, spec: SequenceSpec) -> None:
        """Queue a sequence with nothing computed."""
        self.scheduler.add(spec)

    def abort(self, key: SequenceKey) -> bool:
        """Forget a sequence; False if it is not here."""
        return self.scheduler.abort(key)

    def step(self) -> tuple[Event, ...]:
        """One forward pass and what came of it; nothing if nothing can run."""
        plan = self.scheduler.schedule()
        if plan is None:
            return ()
        result = self.executor.run(plan)
        return self.scheduler.apply(plan, result)

    def stream(self, specs: Iterable[SequenceSpec]) -> Iterator[Event]:
        """Add the sequences and yield events until nothing is left to do.

        InvalidArgument: a sequence's grammar allows no token that is known. The others stay, and go on when asked to.
        """
        for spec in specs:
            self.add(spec)
        while self.scheduler.has_work:
            events = self.step()
            assert events or not self.scheduler.has_work, "nothing can run and nothing will change that"
            yield from events
            for failed in (event for event in events if isinstance(event, Failed)):
                raise InvalidArgument(failed.message)

    def generate(self, specs: Iterable[SequenceSpec]) -> dict[SequenceKey, tuple[int, ...]]:
        """The tokens sampled for these sequences, and for any added before, all in one batch until all have ended."""
        tokens: dict[SequenceKey, list[int]] = {}
        for event in self.stream(specs):
            if isinstance(event, Sampled):
                tokens.setdefault(event.key, []).append(event.token_id)
        return {key: tuple(sampled) for key, sampled in tokens.items()}
