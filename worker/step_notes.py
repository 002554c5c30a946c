"""The steps of a worker as it will tell them: a ring of records, each told once in each session that asked. Pure."""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import NamedTuple

import structlog

from engine.plan import Phases, Plan
from kvrelay.requests import SessionId
from kvrelay.session import Load
from kvrelay.steps import KEPT_STEPS, StepRecord

log = structlog.get_logger("worker.steps")


class StepTimes(NamedTuple):
    """Monotonic seconds of one turn: before its events were handled, planned, computed. phases: of the executor."""

    begun_at: float
    planned_at: float
    computed_at: float
    phases: Phases | None = None


class StepNotes:
    """A step is noted when it was applied, and recorded when its report is made: there its last phase ends."""

    def __init__(self, limit: int = KEPT_STEPS) -> None:
        self.ring: deque[StepRecord] = deque(maxlen=limit)
        self.num_recorded = 0
        self._told: dict[SessionId, int] = {}
        self._noted: tuple[Plan, StepTimes] | None = None
        self._preempted = 0
        self._has_failed = False

    def open(self, session: SessionId) -> None:
        """It hears of steps from now on."""
        self._told[session] = self.num_recorded

    def close(self, session: SessionId) -> None:
        self._told.pop(session, None)

    def note(self, plan: Plan, times: StepTimes) -> None:
        self._noted = plan, times

    def record(self, load: Load, preempted: int, now: float) -> bool:
        """preempted: how often anything was, since the start. Never raises; False: this step cannot be told."""
        if self._noted is None:
            return True
        (plan, times), self._noted = self._noted, None
        try:
            made = _record(plan, times, load, preempted - self._preempted, now)
        except Exception:  # what is only told must not end the engine
            if not self._has_failed:
                log.exception("a step could not be recorded", step=plan.step_id)
            self._has_failed = True
            return False
        self.ring.append(made)
        self._preempted = preempted
        self.num_recorded += 1
        return True

    def take(self, session: SessionId) -> tuple[StepRecord, ...]:
        """Those that the session has not heard of, oldest first; what fell out of the ring is lost."""
        told = self._told.get(session)
        if told is None or told == self.num_recorded:
            return ()
        self._told[session] = self.num_recorded
        if told == self.num_recorded - 1:
            return (self.ring[-1],)
        return tuple(islice(self.ring, max(0, len(self.ring) - (self.num_recorded - told)), None))


def _record(plan: Plan, times: StepTimes, load: Load, preemptions: int, now: float) -> StepRecord:
    tokens = prefill = batch = 0
    for rows in plan.slices:
        n = len(rows.token_ids)
        tokens += n
        if rows.samples:
            batch += 1 + len(rows.forks)
        if n > 1 or not rows.samples:
            prefill += n
    begun, planned, computed, phases = times
    build, forward, sample = phases if phases is not None else (0.0, computed - planned, 0.0)
    # What the executor's own phases leave of the call was spent around them.
    build += max(0.0, computed - planned - build - forward - sample)
    blocks = load.blocks
    return StepRecord(
        plan.step_id,
        begun,
        planned - begun,
        build,
        forward,
        sample,
        now - computed,
        batch,
        prefill,
        tokens,
        blocks.total - blocks.free - blocks.cached,
        load.transfers_in_flight,
        preemptions,
        len(plan.swap_out) + len(plan.swap_in),
    )
