"""Traces of HTTP calls: one SERVER span for each request, continuing the caller's trace. As kvrelay.rpc's for gRPC."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, TracerProvider
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvrelay.telemetry import names
from kvrelay.telemetry.calls import CallIds


class CallTracing:
    def __init__(self, provider: TracerProvider) -> None:
        self._tracer = provider.get_tracer(names.TRACER)
        self._propagator = TraceContextTextMapPropagator()

    def start(self, method: str, route: str, headers: Mapping[str, str], ids: CallIds) -> Span:
        """headers: lower-case names; traceparent and tracestate are looked at."""
        span = self._tracer.start_span(
            f"{method} {route}",
            context=self._propagator.extract(headers, context=otel_context.Context()),
            kind=SpanKind.SERVER,
            attributes={names.HTTP_METHOD: method, names.HTTP_ROUTE: route, names.REQUEST_ID: ids.request_id},
        )
        if ids.label:
            span.set_attribute(names.LABEL, ids.label)
        return span


def inside(span: Span) -> AbstractContextManager[Span]:
    """The span is the current one in the block, and goes on after it."""
    return trace.use_span(span, end_on_exit=False, record_exception=False, set_status_on_exception=False)


def end_span(span: Span, status: int) -> None:
    """status: 499 where the client has gone."""
    span.set_attribute(names.HTTP_STATUS, status)
    if status >= 499:
        span.set_status(Status(StatusCode.ERROR, f"HTTP {status}"))
    span.end()
