"""The steps that workers report: which token came of which step, and what steps cost there. Pure; knows no request.

For each worker there is one WorkerSteps per session of one incarnation; requests keep the one that served them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import structlog

from kvrelay.gaps import StepLog, StepRecord
from kvrelay.requests import Role, WorkerId
from kvrelay.session import Report, TokenOut, WorkerDescription
from kvrelay.telemetry.buckets import Buckets
from kvrelay.telemetry.names import STEP_BUCKETS

log = structlog.get_logger("coordinator.steps")

UNTOLD_LIMIT = 16_384
"""Steps that wait for export; older ones are dropped when nobody takes them."""


class WorkerSteps:
    def __init__(self, description: WorkerDescription, keep: bool) -> None:
        self.description = description
        self.log = StepLog()
        self.untold: deque[StepRecord] = deque(maxlen=UNTOLD_LIMIT)
        """For export, if steps are kept for it."""
        self.durations = Buckets(STEP_BUCKETS)
        self.is_gone = self.has_failed = False
        self._keep = keep

    def add(self, steps: Sequence[StepRecord]) -> None:
        for step in steps:
            self.log.add(step)
            self.durations.add(step.duration_s)
        if self._keep:
            self.untold.extend(steps)


class StepsHeard:
    """keep: steps are exported, by whoever takes them from `untold`."""

    def __init__(self, keep: bool = False) -> None:
        self._keep = keep
        self._workers: dict[WorkerId, WorkerSteps] = {}
        self._left: dict[WorkerId, deque[tuple[StepRecord, int]]] = {}
        self._gone: deque[WorkerSteps] = deque(maxlen=64)
        self.current: StepRecord | None = None
        """Of the token that is being taken in."""

    def of(self, worker: WorkerId | None) -> WorkerSteps | None:
        return None if worker is None else self._workers.get(worker)

    def all(self) -> list[WorkerSteps]:
        """Also those that were lost and have untold steps."""
        return [*self._gone, *self._workers.values()]

    def forget_gone(self) -> None:
        """What was left of lost workers has been told."""
        self._gone.clear()

    def lost(self, worker: WorkerId) -> None:
        gone = self._workers.pop(worker, None)
        self._left.pop(worker, None)
        if gone is not None:
            gone.is_gone = True
            self._gone.append(gone)

    def heard(self, worker: WorkerId, report: Report) -> bool:
        """The steps of a report; its tokens come next. False: they could not be added up; never raises for that."""
        if report.welcome is not None:
            self.lost(worker)
            self._workers[worker] = WorkerSteps(report.welcome, self._keep)
            self._left[worker] = deque()
        known = self._workers.get(worker)
        if known is None or not report.steps:
            return True
        sound = True
        try:
            known.add(report.steps)
        except Exception:  # what is only told must not end a session
            if not known.has_failed:
                log.exception("steps could not be added up", worker=worker)
            known.has_failed = True
            sound = False
        if known.description.role is Role.PREFILL:
            return sound  # its clock is not that of the steps that follow; what it took is told by its own spans
        left = self._left[worker]
        for step, count in zip(report.steps, report.step_tokens, strict=True):
            if count:
                left.append((step, count))
        return sound

    def runs(
        self, worker: WorkerId, tokens: Sequence[TokenOut]
    ) -> Iterator[tuple[StepRecord | None, Sequence[TokenOut]]]:
        """Tokens of one report with the step of decode that made them, None for those of prefill.

        What a report in several frames still owes stays for its next frame.
        """
        left, begin = self._left.get(worker), 0
        while left and begin < len(tokens):
            step, count = left.popleft()
            run = tokens[begin : begin + count] if begin or count < len(tokens) else tokens
            begin += len(run)
            if len(run) < count:
                left.appendleft((step, count - len(run)))
            yield step, run
        if begin < len(tokens):
            yield None, tokens[begin:]
