"""The span tree of one finished request, built once from what was recorded. Knows no clock, worker or exporter.

Cost is a few spans per request, never one per token: offsets of tokens are array attributes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from opentelemetry import trace
from opentelemetry.trace import Span, Status, StatusCode, Tracer

from kvrelay.telemetry import names

SEGMENT_TOKENS = 512
"""Tokens per decode span."""

AttributeValue = str | bool | int | float | Sequence[float]


@dataclass(frozen=True, slots=True)
class Interval:
    """Seconds from accept."""

    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk of a prompt on the prefill worker, in seconds from accept."""

    start_s: float
    end_s: float
    num_tokens: int


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """What the coordinator recorded of a request. All times are seconds from accept; intervals that never were: None.

    accepted_ns: wall clock at accept. ended_s: when the stream ended. token_offsets_s: one per output token.
    outcome: "stop", "length" or the class name of the error. lost_worker: the worker whose loss ended the request;
    its open span is closed as lost.
    """

    request_id: str
    accepted_ns: int
    ended_s: float
    outcome: str
    model: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    token_offsets_s: tuple[float, ...] = ()
    prefill_worker: str = ""
    decode_worker: str = ""
    lost_worker: str = ""
    queue: Interval | None = None
    place: Interval | None = None
    reserve: Interval | None = None
    prefill: Interval | None = None
    chunks: tuple[Chunk, ...] = ()
    push: Interval | None = None
    decode: Interval | None = None
    transport: str = ""
    num_blocks: int = 0
    num_bytes: int = 0
    exposed_s: float = 0.0


def build_request_spans(tracer: Tracer, record: RequestTrace, parent: Span | None = None) -> None:
    """Adds the record's children to `parent` (default: the current span, that of the Generate call) and describes it.

    Call it inside the handler, before it returns: the span of the call is still open there. Without a recording
    parent nothing happens.
    """
    parent = trace.get_current_span() if parent is None else parent
    if not parent.is_recording():
        return
    parent.set_attributes(_request_attributes(record))
    builder = _Builder(tracer, record)
    builder.add(parent, names.SPAN_QUEUE, record.queue)
    builder.add(parent, names.SPAN_PLACE, record.place)
    builder.add(parent, names.SPAN_RESERVE, record.reserve, record.decode_worker)
    prefill = builder.add(parent, names.SPAN_PREFILL, record.prefill, record.prefill_worker)
    for chunk in record.chunks if prefill is not None else ():
        interval = Interval(chunk.start_s, chunk.end_s)
        builder.add(prefill, names.SPAN_PREFILL_CHUNK, interval, extra={names.CHUNK_TOKENS: chunk.num_tokens})
    builder.add(parent, names.SPAN_PUSH, record.push, record.prefill_worker, _push_attributes(record))
    for index, interval, extra in _segments(record):
        builder.add(parent, names.SPAN_DECODE, interval, record.decode_worker, {names.SEGMENT: index, **extra})


class _Builder:
    """Makes ended spans out of intervals of one record."""

    def __init__(self, tracer: Tracer, record: RequestTrace) -> None:
        self._tracer = tracer
        self._record = record

    def add(
        self,
        parent: Span | None,
        name: str,
        interval: Interval | None,
        worker: str = "",
        extra: Mapping[str, AttributeValue] | None = None,
    ) -> Span | None:
        if interval is None or parent is None:
            return None
        attributes: dict[str, AttributeValue] = dict(extra or {})
        if worker:
            attributes[names.WORKER] = worker
        span = self._tracer.start_span(
            name,
            context=trace.set_span_in_context(parent),
            attributes=attributes,
            start_time=self._wall_ns(interval.start_s),
        )
        if worker and worker == self._record.lost_worker and interval.end_s >= self._record.ended_s:
            span.set_attribute(names.LOST, True)
            span.set_status(Status(StatusCode.ERROR, "worker lost"))
        span.end(self._wall_ns(max(interval.start_s, interval.end_s)))
        return span

    def _wall_ns(self, offset_s: float) -> int:
        return self._record.accepted_ns + round(offset_s * 1e9)


def _request_attributes(record: RequestTrace) -> dict[str, AttributeValue]:
    attributes: dict[str, AttributeValue] = {
        names.OPERATION: "text_completion",
        names.PROVIDER: "kvrelay",
        names.MODEL: record.model,
        names.REQUEST_ID: record.request_id,
        names.OUTCOME: record.outcome,
        names.INPUT_TOKENS: record.prompt_tokens,
        names.OUTPUT_TOKENS: len(record.token_offsets_s),
        names.CACHED_TOKENS: record.cached_tokens,
    }
    if record.token_offsets_s:
        attributes[names.TTFT_S] = record.token_offsets_s[0]
    return attributes


def _push_attributes(record: RequestTrace) -> dict[str, AttributeValue]:
    attributes: dict[str, AttributeValue] = {
        names.TRANSPORT: record.transport,
        names.BLOCKS: record.num_blocks,
        names.BYTES: record.num_bytes,
        names.EXPOSED_S: record.exposed_s,
    }
    seconds = record.push.end_s - record.push.start_s if record.push is not None else 0.0
    if seconds > 0:
        attributes[names.GB_PER_S] = record.num_bytes / seconds / 1e9
    return attributes


def _segments(record: RequestTrace) -> list[tuple[int, Interval, dict[str, AttributeValue]]]:
    """Decode cut every SEGMENT_TOKENS tokens; each piece ends at its last token, the last one where decode ended."""
    if record.decode is None:
        return []
    offsets, start, out = record.token_offsets_s, record.decode.start_s, []
    for index, first in enumerate(range(0, max(1, len(offsets)), SEGMENT_TOKENS)):
        piece = offsets[first : first + SEGMENT_TOKENS]
        last = first + SEGMENT_TOKENS >= len(offsets)
        end = record.decode.end_s if last else piece[-1]
        extra: dict[str, AttributeValue] = {names.FIRST_INDEX: first, names.TOKEN_OFFSETS_S: piece}
        out.append((index, Interval(start, end), extra))
        start = end
    return out
