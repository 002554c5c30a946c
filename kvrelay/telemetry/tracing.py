"""Where spans go: nowhere, a file of OTLP JSON lines, an OTLP collector. Knows no span's meaning; sets no global."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from pathlib import Path

from opentelemetry import trace
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider as SdkTracerProvider
from opentelemetry.sdk.trace import sampling
from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.trace import NoOpTracerProvider, Span, TracerProvider
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvrelay.telemetry.export import Dropped, Gate, Queue
from kvrelay.telemetry.otlp_lines import LinesExporter

QUEUE_SPANS = 4096
"""Spans waiting for export; beyond it new ones are dropped: telling never holds serving."""
BATCH_SPANS = 256
EXPORT_DELAY_S = 1.0
EXPORT_TIMEOUT_S = 2.0
CLOSE_S = 2.0


@dataclass(frozen=True, slots=True)
class Tracing:
    """A provider and its end. The owner calls `close` once, after the server has stopped.

    is_on: spans go anywhere at all. ratio: the share of traces that is kept without a reason. dropped: spans not told.
    """

    provider: TracerProvider
    is_on: bool = False
    ratio: float = 1.0
    dropped: Dropped = field(default_factory=Dropped)

    def close(self, timeout_s: float = CLOSE_S) -> bool:
        """Exports what waits, for at most timeout_s, and ends. False: a collector did not answer in time."""
        if not isinstance(self.provider, SdkTracerProvider):
            return True
        # The SDK's own shutdown waits up to 30 s for a dead collector; a daemon thread does not hold the exit.
        closer = threading.Thread(target=self.provider.shutdown, name="trace-close", daemon=True)
        closer.start()
        closer.join(timeout_s)
        return not closer.is_alive()


def setup(service_name: str, trace_dir: str = "", otlp_endpoint: str = "", ratio: float = 1.0) -> Tracing:
    """Spans go to trace_dir/SERVICE-PID.jsonl, to the collector at otlp_endpoint (gRPC), to both, or nowhere.

    Nowhere costs nothing but passing a caller's trace on. OSError if trace_dir cannot be written. ratio: of calls whose
    own end does not say whether they are kept; a caller that does not sample its trace has decided for us.
    """
    exporters = []
    if trace_dir:
        exporters.append(_file_exporter(service_name, Path(trace_dir)))
    if otlp_endpoint:
        exporters.append(_collector_exporter(otlp_endpoint))
    if not exporters:
        return Tracing(NoOpTracerProvider())
    resource = Resource.create({SERVICE_NAME: service_name, "process.pid": os.getpid()})
    provider = SdkTracerProvider(sampler=sampling.DEFAULT_ON, resource=resource, shutdown_on_exit=False)
    dropped = Dropped()
    queues = [Queue(exporter, dropped, QUEUE_SPANS, BATCH_SPANS, EXPORT_DELAY_S) for exporter in exporters]
    provider.add_span_processor(Gate(ratio, queues))
    return Tracing(provider, True, ratio, dropped)


def traceparent_of(span: Span | None = None) -> str:
    """W3C traceparent of a span (default: the current one); empty without a trace."""
    carrier: dict[str, str] = {}
    context = trace.set_span_in_context(span) if span is not None else None
    TraceContextTextMapPropagator().inject(carrier, context=context)
    return carrier.get("traceparent", "")


def _file_exporter(service_name: str, directory: Path) -> SpanExporter:
    directory.mkdir(parents=True, exist_ok=True)
    return LinesExporter(directory / f"{service_name}-{os.getpid()}.jsonl")


def _collector_exporter(endpoint: str) -> SpanExporter:
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(endpoint=endpoint, insecure=not endpoint.startswith("https"), timeout=EXPORT_TIMEOUT_S)
