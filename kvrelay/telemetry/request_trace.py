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
class Late:
    """A gap worth an event: the token after it, its seconds, what it was mostly, and when it ended (from accept)."""

    index: int
    seconds: float
    cause: str
    at_s: float


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
class AttemptTrace:
    """One try on one placement. token_offsets_s: of its own tokens, the first of which has index first_index.

    ended_s: when the request ended or the attempt was lost. lost_worker: whose loss that was; its open span is closed
    as lost. cause, migrated_s: why it was lost, and when the tokens went on (or the request ended). Without a prefill
    worker decode computed the prompt. sequence: which of n sequences, None for what they have in common. step_ids,
    batch: of the steps that made the tokens, 0 where none is known; sent_s: when each was written, from accept.
    incarnation: of the decode worker. late: gaps of its tokens that are worth an event.
    """

    ended_s: float
    number: int = 0
    first_index: int = 0
    token_offsets_s: tuple[float, ...] = ()
    prefill_worker: str = ""
    decode_worker: str = ""
    lost_worker: str = ""
    cause: str = ""
    migrated_s: float | None = None
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
    sequence: int | None = None
    step_ids: tuple[int, ...] = ()
    batch: tuple[int, ...] = ()
    sent_s: tuple[float, ...] = ()
    incarnation: str = ""
    late: tuple[Late, ...] = ()


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """What the coordinator recorded of a request. All times are seconds from accept; intervals that never were: None.

    accepted_ns: wall clock at accept. outcome: "stop", "length" or the class name of the error. attempts: the lost
    ones, then the one that the request ended with; of n sequences first what they have in common, then those of each.
    """

    request_id: str
    accepted_ns: int
    outcome: str
    attempts: tuple[AttemptTrace, ...]
    model: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    accepted_s: float = 0.0
    """Monotonic seconds at accept: what joins offsets to steps of workers."""


def build_request_spans(tracer: Tracer, record: RequestTrace, parent: Span | None = None) -> None:
    """Adds the record's children to `parent` (default: the current span, that of the Generate call) and describes it.

    Call it inside the handler, before it returns: the span of the call is still open there. Without a recording
    parent nothing happens.
    """
    parent = trace.get_current_span() if parent is None else parent
    if not parent.is_recording():
        return
    parent.set_attributes(_request_attributes(record))
    for attempt in record.attempts:
        _build_attempt(_Builder(tracer, record.accepted_ns, attempt), parent, attempt)


def _build_attempt(builder: _Builder, parent: Span, attempt: AttemptTrace) -> None:
    builder.add(parent, names.SPAN_QUEUE, attempt.queue)
    builder.add(parent, names.SPAN_PLACE, attempt.place)
    builder.add(parent, names.SPAN_RESERVE, attempt.reserve, attempt.decode_worker)
    prefill = builder.add(parent, names.SPAN_PREFILL, attempt.prefill, attempt.prefill_worker or attempt.decode_worker)
    for chunk in attempt.chunks if prefill is not None else ():
        interval = Interval(chunk.start_s, chunk.end_s)
        builder.add(prefill, names.SPAN_PREFILL_CHUNK, interval, extra={names.CHUNK_TOKENS: chunk.num_tokens})
    builder.add(parent, names.SPAN_PUSH, attempt.push, attempt.prefill_worker, _push_attributes(attempt))
    for index, interval, extra in _segments(attempt):
        late = [each for each in attempt.late if _holds(attempt, index, each.index)]
        builder.add(parent, names.SPAN_DECODE, interval, attempt.decode_worker, {names.SEGMENT: index, **extra}, late)
    if attempt.migrated_s is not None:
        tokens = attempt.first_index + len(attempt.token_offsets_s)
        about: dict[str, AttributeValue] = {names.CAUSE: attempt.cause, names.TOKENS_SO_FAR: tokens}
        about[names.WORKER] = attempt.lost_worker
        builder.add(parent, names.SPAN_MIGRATE, Interval(attempt.ended_s, attempt.migrated_s), extra=about)


class _Builder:
    """Makes ended spans out of intervals of one attempt."""

    def __init__(self, tracer: Tracer, accepted_ns: int, attempt: AttemptTrace) -> None:
        self._tracer = tracer
        self._accepted_ns = accepted_ns
        self._attempt = attempt

    def add(
        self,
        parent: Span | None,
        name: str,
        interval: Interval | None,
        worker: str = "",
        extra: Mapping[str, AttributeValue] | None = None,
        late: Sequence[Late] = (),
    ) -> Span | None:
        if interval is None or parent is None:
            return None
        attributes: dict[str, AttributeValue] = {names.ATTEMPT: self._attempt.number, **(extra or {})}
        if self._attempt.sequence is not None:
            attributes[names.SEQUENCE] = self._attempt.sequence
        if worker:
            attributes[names.WORKER] = worker
        span = self._tracer.start_span(
            name,
            context=trace.set_span_in_context(parent),
            attributes=attributes,
            start_time=self._wall_ns(interval.start_s),
        )
        for each in late:
            about: dict[str, AttributeValue] = {
                names.LATE_INDEX: each.index,
                names.LATE_SECONDS: each.seconds,
                names.LATE_CAUSE: each.cause,
            }
            span.add_event(names.EVENT_LATE, about, self._wall_ns(each.at_s))
        if worker and worker == self._attempt.lost_worker and interval.end_s >= self._attempt.ended_s:
            span.set_attribute(names.LOST, True)
            span.set_status(Status(StatusCode.ERROR, "worker lost"))
        span.end(self._wall_ns(max(interval.start_s, interval.end_s)))
        return span

    def _wall_ns(self, offset_s: float) -> int:
        return self._accepted_ns + round(offset_s * 1e9)


def _request_attributes(record: RequestTrace) -> dict[str, AttributeValue]:
    offsets = [offset for attempt in record.attempts for offset in attempt.token_offsets_s]
    attributes: dict[str, AttributeValue] = {
        names.OPERATION: "text_completion",
        names.PROVIDER: "kvrelay",
        names.MODEL: record.model,
        names.REQUEST_ID: record.request_id,
        names.OUTCOME: record.outcome,
        names.MIGRATIONS: sum(attempt.migrated_s is not None for attempt in record.attempts),
        names.INPUT_TOKENS: record.prompt_tokens,
        names.OUTPUT_TOKENS: len(offsets),
        names.CACHED_TOKENS: record.cached_tokens,
        names.ACCEPTED_S: record.accepted_s,
    }
    if offsets:
        attributes[names.TTFT_S] = offsets[0]
    return attributes


def _push_attributes(attempt: AttemptTrace) -> dict[str, AttributeValue]:
    attributes: dict[str, AttributeValue] = {
        names.TRANSPORT: attempt.transport,
        names.BLOCKS: attempt.num_blocks,
        names.BYTES: attempt.num_bytes,
        names.EXPOSED_S: attempt.exposed_s,
    }
    seconds = attempt.push.end_s - attempt.push.start_s if attempt.push is not None else 0.0
    if seconds > 0:
        attributes[names.GB_PER_S] = attempt.num_bytes / seconds / 1e9
    return attributes


def _holds(attempt: AttemptTrace, segment: int, index: int) -> bool:
    return (index - attempt.first_index) // SEGMENT_TOKENS == segment


def _segments(attempt: AttemptTrace) -> list[tuple[int, Interval, dict[str, AttributeValue]]]:
    """Decode cut every SEGMENT_TOKENS tokens; each piece ends at its last token, the last one where decode ended."""
    if attempt.decode is None:
        return []
    offsets, start, out = attempt.token_offsets_s, attempt.decode.start_s, []
    for index, first in enumerate(range(0, max(1, len(offsets)), SEGMENT_TOKENS)):
        piece = offsets[first : first + SEGMENT_TOKENS]
        last = first + SEGMENT_TOKENS >= len(offsets)
        end = attempt.decode.end_s if last else piece[-1]
        extra: dict[str, AttributeValue] = {
            names.FIRST_INDEX: attempt.first_index + first,
            names.TOKEN_OFFSETS_S: piece,
            names.STEP_IDS: attempt.step_ids[first : first + SEGMENT_TOKENS],
            names.BATCH: attempt.batch[first : first + SEGMENT_TOKENS],
            names.SENT_S: attempt.sent_s[first : first + SEGMENT_TOKENS],
            names.INCARNATION: attempt.incarnation,
        }
        out.append((index, Interval(start, end), extra))
        start = end
    return out
