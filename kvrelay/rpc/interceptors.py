"""Tracing of served calls: one SERVER span each, continuing the caller's trace. Knows no exporter and no service.

The span is current inside the handler's own task and ends with the status that really happened.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

import grpc
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, TracerProvider
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvrelay.errors import KVRelayError
from kvrelay.rpc.edge import Body, Context, Continuation, Handler, body_of, with_body
from kvrelay.rpc.status import code_of
from kvrelay.telemetry import names
from kvrelay.telemetry.calls import current, labelled

GENERATE = "/kvrelay.v1.InferenceService/Generate"


class TracingInterceptor(grpc.aio.ServerInterceptor):
    """Stands behind the edge, so that it sees a handler's own exception. methods: the paths to trace."""

    def __init__(self, provider: TracerProvider, methods: Collection[str] = (GENERATE,)) -> None:
        self._tracer = provider.get_tracer(names.TRACER)
        self._methods = frozenset(methods)
        self._propagator = TraceContextTextMapPropagator()

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method not in self._methods:
            return handler
        return with_body(handler, self._traced(handler, handler_call_details))

    def _traced(self, handler: Handler, details: grpc.HandlerCallDetails) -> Body:
        body, name = body_of(handler), details.method.lstrip("/")
        carrier = {key: value for key, value in details.invocation_metadata or () if isinstance(value, str)}

        async def run(request: Any, context: Context) -> Any:
            span = self._start(name, carrier)
            # Attached in a coroutine of its own task, where nothing is yielded: detach meets the same context.
            token = otel_context.attach(trace.set_span_in_context(span))
            code = grpc.StatusCode.UNKNOWN
            _identify(span)
            try:
                answer = await body(request, context)
                code = grpc.StatusCode.OK
                return answer
            except BaseException as error:
                code = _code_of(error, context)
                raise
            finally:
                otel_context.detach(token)
                _end(span, code)

        return run

    def _start(self, name: str, carrier: dict[str, str]) -> Span:
        service, _, method = name.partition("/")
        return self._tracer.start_span(
            name,
            context=self._propagator.extract(carrier, context=otel_context.Context()),
            kind=SpanKind.SERVER,
            attributes={names.RPC_SYSTEM: "grpc", names.RPC_SERVICE: service, names.RPC_METHOD: method},
        )


def _identify(span: Span) -> None:
    """Whose call it is, also of one that is refused at once."""
    ids = current()
    if ids is not None:
        span.set_attribute(names.REQUEST_ID, ids.request_id)
        labelled("")


def _code_of(error: BaseException, context: Context) -> grpc.StatusCode:
    match error:
        case KVRelayError():
            return code_of(error)
        case asyncio.CancelledError() | GeneratorExit():
            left = context.time_remaining()
            return grpc.StatusCode.CANCELLED if left is None or left > 0 else grpc.StatusCode.DEADLINE_EXCEEDED
        case grpc.aio.AbortError():
            return context.code() or grpc.StatusCode.UNKNOWN
        case _:
            return grpc.StatusCode.INTERNAL


def _end(span: Span, code: grpc.StatusCode) -> None:
    span.set_attribute(names.RPC_STATUS_CODE, code.name)
    if code is not grpc.StatusCode.OK:
        span.set_status(Status(StatusCode.ERROR, code.name))
    span.end()
