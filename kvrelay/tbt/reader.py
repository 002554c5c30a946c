"""Requests, decode segments and steps out of spans. Knows the names of our attributes, and nothing of causes.

Spans come in any order and from any number of files; one that is there twice counts once. A span of ours that is not
as we write it is named and passed over.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from kvrelay.gaps import StepRecord
from kvrelay.tbt.arrays import KEY
from kvrelay.tbt.otlp import Floats, Ints, Malformed, Problems, Span, files_of, spans_of
from kvrelay.telemetry import names

COLUMNS = StepRecord._fields[1:]
"""Of step records, behind the id."""

WorkerLife = tuple[str, str]
"""(worker id, incarnation)."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens of one attempt, in order. Arrays have one shape (n,); seconds count from accept.

    step_ids: 0 for a token that no recorded step made. sent_s: when the token had been written to the client.
    """

    worker: str
    incarnation: str
    attempt: int
    sequence: int
    first_index: int
    offsets_s: Floats
    sent_s: Floats
    step_ids: Ints
    batch: Ints


@dataclass(frozen=True, slots=True)
class Piece:
    """Another part of a request's life: prefill, kv.push, migrate... Seconds from accept.

    cause: of a migration. exposed_s: of a push, from token 0 to landed.
    """

    name: str
    start_s: float
    end_s: float
    worker: str
    attempt: int
    sequence: int | None
    cause: str
    exposed_s: float


@dataclass(frozen=True, slots=True)
class Request:
    """accepted_s: on the coordinator's monotonic clock; None where the recording does not say."""

    request_id: str
    trace_id: str
    outcome: str
    accepted_s: float | None
    segments: tuple[Segment, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Steps:
    """All steps known of one life of a worker, by rising id. clock_offset_s: what makes start_s coordinator time."""

    worker: str
    incarnation: str
    role: str
    ids: Ints
    columns: dict[str, Floats]
    clock_offset_s: Floats
    clock_error_s: Floats

    def rows(self, step_ids: Ints) -> Ints:
        """Row of each id, -1 for those that are not there."""
        if not len(self.ids):
            return np.full(len(step_ids), -1, dtype=np.int64)
        rows = np.searchsorted(self.ids, step_ids)
        rows = np.minimum(rows, len(self.ids) - 1)
        found: Ints = np.where(self.ids[rows] == step_ids, rows, -1)
        return found


@dataclass(frozen=True, slots=True)
class Recording:
    """num_rootless: requests whose own span is missing. num_other: spans that are none of ours."""

    requests: tuple[Request, ...]
    steps: dict[WorkerLife, Steps]
    num_files: int
    num_spans: int
    num_other: int
    num_rootless: int
    problems: Problems


@dataclass(slots=True)
class _Gathered:
    """What was read so far; requests by (trace, span) of their root."""

    roots: dict[tuple[str, str], Span] = field(default_factory=dict)
    segments: dict[tuple[str, str], list[Segment]] = field(default_factory=lambda: defaultdict(list))
    pieces: dict[tuple[str, str], list[Span]] = field(default_factory=lambda: defaultdict(list))
    steps: dict[WorkerLife, list[Steps]] = field(default_factory=lambda: defaultdict(list))
    seen: set[tuple[str, str]] = field(default_factory=set)
    num_other: int = 0


PIECES = frozenset({names.SPAN_QUEUE, names.SPAN_RESERVE, names.SPAN_PREFILL, names.SPAN_PUSH, names.SPAN_MIGRATE})


def read(paths: list[Path]) -> Recording:
    """Everything that the files and folders hold. NotFound where there is no file."""
    problems, gathered = Problems(), _Gathered()
    files = files_of(paths)
    for path in files:
        for span in spans_of(path, problems):
            try:
                _take(span, gathered)
            except (Malformed, ValueError, OverflowError) as error:
                problems.skip(span.where, f"span {span.name}: {error}")
    return _recording(gathered, len(files), problems)


def _take(span: Span, gathered: _Gathered) -> None:
    key = (span.trace_id, span.span_id)
    if key in gathered.seen:
        return
    parent = (span.trace_id, span.parent_id)
    if names.REQUEST_ID in span.attributes:
        gathered.roots[key] = _light(span)
    elif span.name == names.SPAN_STEPS and names.STEPS_IDS in span.attributes:
        steps = _steps(span)
        gathered.steps[steps.worker, steps.incarnation].append(steps)
    elif span.name == names.SPAN_DECODE and names.TOKEN_OFFSETS_S in span.attributes:
        gathered.segments[parent].append(_segment(span))
        gathered.pieces[parent].append(_light(span))
    elif span.name in PIECES and names.ATTEMPT in span.attributes:
        gathered.pieces[parent].append(_light(span))
    else:
        gathered.num_other += 1
    gathered.seen.add(key)


def _light(span: Span) -> Span:
    """Without its arrays: as parsed they take many times the memory of numbers."""
    arrays = {"arrayValue", KEY}
    kept = {
        key: value for key, value in span.attributes.items() if isinstance(value, dict) and arrays.isdisjoint(value)
    }
    return replace(span, attributes=kept, arrays=())


def _segment(span: Span) -> Segment:
    offsets = span.floats(names.TOKEN_OFFSETS_S)
    count = len(offsets)
    sent, step_ids, batch = (
        span.floats(names.SENT_S),
        span.ints(names.STEP_IDS),
        span.ints(names.BATCH),
    )
    for name, values in ((names.SENT_S, sent), (names.STEP_IDS, step_ids), (names.BATCH, batch)):
        if len(values) not in {0, count}:
            raise Malformed(f"{name} has {len(values)} values for {count} tokens")
    _finite(names.TOKEN_OFFSETS_S, offsets)
    _finite(names.SENT_S, sent)
    return Segment(
        worker=span.text(names.WORKER),
        incarnation=span.text(names.INCARNATION),
        attempt=span.integer(names.ATTEMPT) or 0,
        sequence=span.integer(names.SEQUENCE) or 0,
        first_index=span.integer(names.FIRST_INDEX) or 0,
        offsets_s=offsets,
        # A recording without these says less; it is no reason to refuse it.
        sent_s=sent if len(sent) else offsets,
        step_ids=step_ids if len(step_ids) else np.zeros(count, dtype=np.int64),
        batch=batch if len(batch) else np.zeros(count, dtype=np.int64),
    )


def _steps(span: Span) -> Steps:
    ids = span.ints(names.STEPS_IDS)
    columns = {}
    for column, key in zip(COLUMNS, names.STEPS_FIELDS[1:], strict=True):
        values = columns[column] = span.floats(key)
        if len(values) != len(ids):
            raise Malformed(f"{key} has {len(values)} values for {len(ids)} steps")
        _finite(key, values)
    offset, error = span.number(names.CLOCK_OFFSET_S), span.number(names.CLOCK_ERROR_S)
    return Steps(
        worker=span.text(names.WORKER),
        incarnation=span.text(names.INCARNATION),
        role=span.text(names.ROLE),
        ids=ids,
        columns=columns,
        clock_offset_s=np.full(len(ids), offset or 0.0),
        clock_error_s=np.full(len(ids), error or 0.0),
    )


def _finite(name: str, values: Floats) -> None:
    if not np.isfinite(values).all():
        raise Malformed(f"{name} holds a number that is not finite")


def _recording(gathered: _Gathered, num_files: int, problems: Problems) -> Recording:
    requests = []
    for key, segments in gathered.segments.items():
        requests.append(_request(gathered.roots.get(key), key, segments, gathered.pieces.get(key, [])))
    for key, root in gathered.roots.items():
        if key not in gathered.segments:
            requests.append(_request(root, key, [], gathered.pieces.get(key, [])))
    return Recording(
        requests=tuple(requests),
        steps={life: _joined(parts) for life, parts in gathered.steps.items()},
        num_files=num_files,
        num_spans=len(gathered.seen),
        num_other=gathered.num_other,
        num_rootless=sum(key not in gathered.roots for key in gathered.segments),
        problems=problems,
    )


def _request(root: Span | None, key: tuple[str, str], segments: list[Segment], pieces: list[Span]) -> Request:
    accept_ns = _accept_ns(root, pieces)
    return Request(
        request_id=root.text(names.REQUEST_ID) if root is not None else f"trace {key[0][:8]}",
        trace_id=key[0],
        outcome=root.text(names.OUTCOME) if root is not None else "",
        accepted_s=root.number(names.ACCEPTED_S) if root is not None else None,
        segments=tuple(sorted(segments, key=lambda part: (part.sequence, part.attempt, part.first_index))),
        pieces=tuple(sorted((_piece(span, accept_ns) for span in pieces), key=lambda piece: piece.start_s)),
    )


def _accept_ns(root: Span | None, pieces: list[Span]) -> int:
    """The wall clock at accept: where waiting in the queue begins, the first piece; the root opens a little earlier."""
    starts = [span.start_ns for span in pieces if span.name == names.SPAN_QUEUE]
    return min(starts) if starts else (root.start_ns if root is not None else 0)


def _piece(span: Span, accept_ns: int) -> Piece:
    return Piece(
        name=span.name,
        start_s=(span.start_ns - accept_ns) / 1e9,
        end_s=(span.end_ns - accept_ns) / 1e9,
        worker=span.text(names.WORKER),
        attempt=span.integer(names.ATTEMPT) or 0,
        sequence=span.integer(names.SEQUENCE),
        cause=span.text(names.CAUSE),
        exposed_s=span.number(names.EXPOSED_S) or 0.0,
    )


def _joined(parts: list[Steps]) -> Steps:
    """By rising id, each id once."""
    ids, first = np.unique(np.concatenate([part.ids for part in parts]), return_index=True)
    columns = {name: np.concatenate([part.columns[name] for part in parts])[first] for name in COLUMNS}
    offset = np.concatenate([part.clock_offset_s for part in parts])[first]
    error = np.concatenate([part.clock_error_s for part in parts])[first]
    return Steps(parts[0].worker, parts[0].incarnation, parts[0].role, ids, columns, offset, error)
