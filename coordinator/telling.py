"""What is told of requests and workers: traces that are kept, steps beside them, sums for metrics.

A trace is kept because the ratio says so, or because its request was slow; that is known at its end, and only then is
its tree built. Off, nothing is collected.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import structlog
from opentelemetry import trace
from opentelemetry.trace import Span

from coordinator.clock_offset import Offset
from coordinator.figures import RequestFigures
from coordinator.late import Gaps, gaps_of
from coordinator.live import Live
from coordinator.steps_export import export_steps
from coordinator.steps_heard import StepsHeard
from coordinator.traces import outcome_of, trace_of
from kvrelay.requests import WorkerId
from kvrelay.session import Pushed
from kvrelay.telemetry import names
from kvrelay.telemetry.export import KEPT_NOT, KEPT_SAMPLED, KEPT_SLOW, in_ratio
from kvrelay.telemetry.genai import GenAiMetrics
from kvrelay.telemetry.request_trace import build_request_spans
from kvrelay.telemetry.tracing import Tracing

log = structlog.get_logger("coordinator.telling")

SWEEP_S = 0.5
UNKNOWN_CLOCK = Offset(0.0, 1e9)
"""Of a worker that went before its first heartbeat came back."""


class Telling:
    """measures: metrics are served, so sums are made although nothing is traced. slow_s: 0 keeps nothing for it."""

    def __init__(
        self,
        tracing: Tracing,
        steps: StepsHeard,
        clock_of: Callable[[WorkerId], Offset | None],
        *,
        slow_s: float = 0.0,
        measures: bool = False,
        gen_ai: GenAiMetrics | None = None,
    ) -> None:
        self._tracing = tracing
        self._tracer = tracing.provider.get_tracer(names.TRACER)
        self._steps = steps
        self._clock_of = clock_of
        self._slow_s = slow_s
        self._measures = measures
        self._gen_ai = gen_ai
        self._clocks: dict[str, Offset] = {}
        self.figures = RequestFigures()

    def started(self) -> None:
        self.figures.started += 1

    def ended(self, live: Live, model: str, now: float) -> None:
        """Call it inside the handler, whose span is current, once the stream is over. Never raises."""
        try:
            self._ended(live, model, now, trace.get_current_span())
        except Exception:
            log.exception("a request's end could not be told", request=live.id)

    def _ended(self, live: Live, model: str, now: float, span: Span) -> None:
        outcome = outcome_of(live)
        facts = live.facts
        looked_for = facts.prefix_cache and any(a.prefill_record is not None for a in (*live.lost, live.attempt))
        self.figures.ended(outcome, len(facts.prompt_ids) if looked_for else 0, live.cached_tokens)
        for pushed in _pushes(live):
            self.figures.handed_over(pushed)
        if self._gen_ai is not None:
            num_tokens = sum(len(one.journal) for one in live.children or (live,))
            self._gen_ai.ended(model, outcome, now - live.times.accepted_at, _ttft(live), num_tokens)
        recording = span.is_recording()
        if not recording and not self._measures:
            return
        gaps, ttft_s = gaps_of(live, self._measures), _ttft(live)
        if self._measures:
            self.figures.measured(gaps, ttft_s, now - live.times.accepted_at)
        if not recording:
            return
        kept = self._kept(span, gaps, ttft_s)
        span.set_attribute(names.KEPT, kept)
        if kept != KEPT_NOT:
            build_request_spans(self._tracer, trace_of(live, model, now, gaps.late), span)

    def _kept(self, span: Span, gaps: Gaps, ttft_s: float | None) -> str:
        if in_ratio(span.get_span_context().trace_id, self._tracing.ratio):
            return KEPT_SAMPLED
        slow = self._slow_s > 0 and max(gaps.longest_s, ttft_s or 0.0) > self._slow_s
        return KEPT_SLOW if slow else KEPT_NOT

    async def run(self) -> None:
        """Exports the steps of workers twice a second."""
        while True:
            await asyncio.sleep(SWEEP_S)
            self.tell_steps()

    def tell_steps(self) -> None:
        if not self._tracing.is_on:
            return
        now, now_ns = time.monotonic(), time.time_ns()
        for steps in self._steps.all():
            about = steps.description
            clock = self._clock_of(about.worker_id) or self._clocks.get(about.incarnation)
            if clock is not None:
                self._clocks[about.incarnation] = clock
            if steps.untold and (clock is not None or steps.is_gone):
                try:
                    export_steps(self._tracer, steps, clock or UNKNOWN_CLOCK, now, now_ns)
                except Exception:  # whatever a worker's clock says, it must not end the coordinator
                    if not steps.has_failed:
                        log.exception("steps could not be exported", worker=about.worker_id)
                    steps.has_failed = True
        self._steps.forget_gone()
        if len(self._clocks) > 1024:
            self._clocks.clear()


def _pushes(live: Live) -> list[Pushed]:
    """Each hand-off once, though n sequences know of it."""
    attempts = [attempt for one in (live, *live.children) for attempt in (*one.lost, one.attempt)]
    found = {(a.pushed.request_id, a.pushed.attempt): a.pushed for a in attempts if a.pushed is not None}
    return list(found.values())


def _ttft(live: Live) -> float | None:
    """Until the first token was written; None if there was none."""
    firsts = [one.journal.sent[0] for one in live.children or (live,) if one.journal.sent]
    return min(firsts) - live.times.accepted_at if firsts else None
