"""Between a span's end and its exporter: what is kept, what waits, what was dropped. Knows no span's meaning.

Telling never holds serving: beyond a bounded queue spans are dropped and counted, and so are those that a collector
did not take.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind

from kvrelay.telemetry import names

KEPT_SAMPLED, KEPT_SLOW, KEPT_NOT = "sampled", "slow", "no"
"""Values of names.KEPT: why a trace is kept, or that it is not."""


def in_ratio(trace_id: int, ratio: float) -> bool:
    """Whether a trace is among the share `ratio` of all: the same for everyone who asks, by its id's lower half."""
    return (trace_id & 0xFFFF_FFFF_FFFF_FFFF) < ratio * 2.0**64


class Dropped:
    """How many spans were not told; touched by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.count = 0

    def add(self, num_spans: int) -> None:
        with self._lock:
            self.count += num_spans


class Queue(SpanProcessor):
    """A batch processor with a bound of its own, so that what it drops is known."""

    def __init__(self, exporter: SpanExporter, dropped: Dropped, limit: int, batch: int, delay_s: float) -> None:
        self._counted = _Counted(exporter, dropped)
        self._dropped = dropped
        self._limit = limit
        self._batches = BatchSpanProcessor(
            self._counted, max_queue_size=2 * limit, max_export_batch_size=batch, schedule_delay_millis=delay_s * 1000
        )

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        pass

    def on_end(self, span: ReadableSpan) -> None:
        if self._counted.waiting >= self._limit:
            self._dropped.add(1)
            return
        self._counted.comes()
        self._batches.on_end(span)

    def shutdown(self) -> None:
        self._batches.shutdown()  # type: ignore[no-untyped-call]  # the SDK's

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._batches.force_flush(timeout_millis)


class _Counted(SpanExporter):
    """Counts what its exporter did not take. waiting: spans that came and are not through yet."""

    def __init__(self, exporter: SpanExporter, dropped: Dropped) -> None:
        self._exporter = exporter
        self._dropped = dropped
        self._lock = threading.Lock()
        self.waiting = 0

    def comes(self) -> None:
        with self._lock:
            self.waiting += 1

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
            return result
        finally:
            with self._lock:
                self.waiting -= len(spans)
            if result is not SpanExportResult.SUCCESS:
                self._dropped.add(len(spans))

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._exporter.force_flush(timeout_millis)


class Gate(SpanProcessor):
    """Lets through what is kept: a served call as its end decided (names.KEPT), one that nobody decided by the ratio.

    Spans below a call are made only when it is kept, so they pass, and so does all else.
    """

    def __init__(self, ratio: float, behind: Sequence[SpanProcessor]) -> None:
        self._ratio = ratio
        self._behind = tuple(behind)

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        pass

    def on_end(self, span: ReadableSpan) -> None:
        if span.kind is SpanKind.SERVER and not self._kept(span):
            return
        for processor in self._behind:
            processor.on_end(span)

    def _kept(self, span: ReadableSpan) -> bool:
        word = (span.attributes or {}).get(names.KEPT)
        if word is not None:
            return word != KEPT_NOT
        return span.context is not None and in_ratio(span.context.trace_id, self._ratio)

    def shutdown(self) -> None:
        for processor in self._behind:
            processor.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        done = [processor.force_flush(timeout_millis) for processor in self._behind]
        return all(done)
