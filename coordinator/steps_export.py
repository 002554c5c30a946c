"""Steps of workers as spans beside the traces: each span a root of its own with a run of steps. Knows no request."""

from __future__ import annotations

from opentelemetry.context import Context
from opentelemetry.trace import Tracer

from coordinator.clock_offset import Offset
from coordinator.steps_heard import WorkerSteps
from kvrelay.gaps import StepRecord
from kvrelay.telemetry import names

SPAN_STEPS = 256
"""Steps of one span at most."""


def export_steps(tracer: Tracer, steps: WorkerSteps, clock: Offset, now: float, now_ns: int) -> int:
    """All that was not told yet; returns the number of spans. now: our monotonic seconds at the wall clock's now_ns."""
    taken = list(steps.untold)
    steps.untold.clear()
    for begin in range(0, len(taken), SPAN_STEPS):
        run = taken[begin : begin + SPAN_STEPS]
        ends = [now_ns + round((at + clock.offset_s - now) * 1e9) for at in (run[0].start_s, run[-1].end_s)]
        span = tracer.start_span(
            names.SPAN_STEPS, context=Context(), attributes=_attributes(steps, run, clock), start_time=ends[0]
        )
        span.end(max(ends))
    return -(-len(taken) // SPAN_STEPS)


def _attributes(steps: WorkerSteps, run: list[StepRecord], clock: Offset) -> dict[str, str | float | tuple[float, ...]]:
    about = steps.description
    return {
        names.WORKER: about.worker_id,
        names.INCARNATION: about.incarnation,
        names.ROLE: about.role.value,
        names.CLOCK_OFFSET_S: clock.offset_s,
        names.CLOCK_ERROR_S: clock.error_s,
        **dict(zip(names.STEPS_FIELDS, zip(*run, strict=True), strict=True)),
    }
