"""One turn of a worker's engine in two halves, around the computing. Knows no threads, no clocks, no mailbox.

1. begin: let the core handle each event, plan a step, hand out what follows (tickets granted, aborts, parts to post),
   so that sends overlap the step;
2. the caller runs the plan;
3. finish: apply the result, hand out the step's reports and parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from engine.plan import Plan, Result
from worker.events import Action, Core, Event
from worker.step_notes import StepTimes

MAX_IDLE_S = 0.5


class EngineTurn:
    """clock: monotonic seconds. `deliver` gets the actions of each half; it must not block."""

    def __init__(self, core: Core, deliver: Callable[[list[Action]], None], clock: Callable[[], float]) -> None:
        self._core, self._deliver, self._clock = core, deliver, clock
        self._begun_at = self._planned_at = 0.0

    def begin(self, events: Iterable[Event]) -> Plan | None:
        self._begun_at = self._clock()
        for event in events:
            self._core.handle(event, self._clock())
        plan = self._core.schedule(self._clock())
        self._hand_out()
        self._planned_at = self._clock()
        return plan

    def finish(self, plan: Plan, result: Result) -> None:
        now = self._clock()
        self._core.apply(plan, result, now)
        self._core.stepped(plan, StepTimes(self._begun_at, self._planned_at, now, result.phases))
        self._hand_out()

    def patience(self, busy: bool) -> float:
        """Seconds to wait for an event before the next turn; busy: the last one had a plan."""
        if busy:
            return 0.0
        due = self._core.next_wake()
        return MAX_IDLE_S if due is None else min(MAX_IDLE_S, max(0.0, due - self._clock()))

    def _hand_out(self) -> None:
        actions = self._core.actions(self._clock())
        if actions:
            self._deliver(actions)
