"""A coordinator's metrics, read from what it keeps anyway. Called from the endpoint's thread: it only reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.core import Metric

from coordinator.dispatch import Dispatcher
from coordinator.events import Cause
from coordinator.figures import RequestFigures
from coordinator.roster import Roster
from kvrelay.gaps import CAUSES
from kvrelay.session import WorkerDescription
from kvrelay.telemetry import names
from kvrelay.telemetry.metrics import Labels, counter, gauge, histogram
from kvrelay.telemetry.tracing import Tracing
from kvrelay.telemetry.worker_metrics import load_metrics

USUAL_OUTCOMES = ("stop", "length", "Cancelled", "DeadlineExceeded", "ResourceExhausted", "Unavailable", "Internal")
"""There from the start with 0, so that a rate over the first of them is not lost; others come with their first."""


@dataclass(frozen=True, slots=True)
class CoordinatorMetrics:
    dispatcher: Dispatcher
    roster: Roster
    figures: RequestFigures
    tracing: Tracing

    def collect(self) -> Iterator[Metric]:
        yield from self._requests()
        yield from self._gaps()
        yield from self._pushes()
        yield from self._workers()
        dropped: list[tuple[Labels, float]] = [({}, float(self.tracing.dropped.count))]
        yield counter(names.PROM_TRACE_DROPPED, "Spans that no exporter took.", dropped)

    def _requests(self) -> Iterator[Metric]:
        figures, counts = self.figures, self.dispatcher.counters
        yield counter(names.PROM_STARTED, "Requests taken in.", [({}, figures.started)])
        ended = {**dict.fromkeys(USUAL_OUTCOMES, 0), **figures.outcomes.copy()}
        outcomes = [({"outcome": name}, float(n)) for name, n in sorted(ended.items())]
        yield counter(names.PROM_OUTCOMES, "Requests by how they ended; with the open ones all started.", outcomes)
        yield counter(
            names.PROM_REFUSED, "Requests refused for want of room; none of them started.", [({}, counts["refused"])]
        )
        yield gauge(names.PROM_OPEN, "Requests that have not ended.", [({}, figures.open)])
        yield gauge(names.PROM_QUEUED, "Requests that wait for a placement.", [({}, self.dispatcher.num_queued)])
        yield counter(names.PROM_CACHE_QUERIED, "Prompt tokens looked for in caches.", [({}, figures.cache_queried)])
        yield counter(names.PROM_CACHE_MATCHED, "Prompt tokens found in caches.", [({}, figures.cache_matched)])
        yield counter(names.PROM_TOKENS, "Tokens of ended requests.", [({}, counts["tokens"])])
        for name, about, kept in (
            (names.PROM_MIGRATIONS, "Sequences moved to another placement, by cause.", "migrated"),
            (
                names.PROM_RECOMPUTED,
                "Tokens that sequences which moved had to compute anew, by cause.",
                "recomputed_tokens",
            ),
        ):
            yield counter(name, about, [({"cause": c.value}, float(counts[f"{kept}.{c.value}"])) for c in Cause])

    def _pushes(self) -> Iterator[Metric]:
        figures = self.figures
        sums = (
            (names.PROM_PUSHES, "Hand-offs that landed.", figures.pushes),
            (names.PROM_PUSH_BYTES, "Bytes of KV blocks that were handed over.", figures.pushed_bytes),
            (names.PROM_PUSH_SECONDS, "Seconds of their writes, one by one.", figures.push_seconds),
        )
        present = dict.fromkeys((worker.transport for worker, _, _ in self.roster.listing()), 0)
        for name, about, values in sums:
            all_of_it = {**present, **dict(values)}
            yield counter(name, about, [({"transport": key}, float(value)) for key, value in all_of_it.items()])
        about = "From the first token to the last block landed."
        yield histogram(names.PROM_PUSH_EXPOSED, about, [({}, figures.exposed)])

    def _gaps(self) -> Iterator[Metric]:
        figures = self.figures
        yield histogram(names.PROM_TTFT, "From accept to the first token written.", [({}, figures.ttft)])
        yield histogram(names.PROM_DURATION, "From accept to the end.", [({}, figures.duration)])
        yield histogram(names.PROM_GAP, "Between two tokens of a stream.", [({}, figures.gaps)])
        by_cause = [({"cause": cause.value}, figures.gap_seconds[i]) for i, cause in enumerate(CAUSES)]
        yield counter(names.PROM_GAP_CAUSE, "Seconds of gaps by cause; they add up to all gaps.", by_cause)

    def _workers(self) -> Iterator[Metric]:
        listing = self.roster.listing()
        yield from load_metrics([(_labels(about), load) for about, load, _ in listing if load is not None])
        up: list[tuple[Labels, float]] = [(_labels(about), 1.0) for about, _, _ in listing]
        yield gauge(names.PROM_WORKER_UP, "Workers with a session.", up)
        clocks = [(about, self.roster.clock_of(about.worker_id)) for about, _, _ in listing]
        errors = [(_labels(about), clock.error_s) for about, clock in clocks if clock is not None]
        yield gauge(names.PROM_CLOCK_ERROR, "How well the worker's clock is known.", errors)
        known = [(about, self.dispatcher.steps.of(about.worker_id)) for about, _, _ in listing]
        steps = [(_labels(about), step.durations) for about, step in known if step is not None]
        yield histogram(names.PROM_STEP, "Steps of a worker.", steps)


def _labels(about: WorkerDescription) -> Labels:
    return {"worker": about.worker_id, "role": about.role.value}
