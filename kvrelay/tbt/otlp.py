"""OTLP JSON as files hold it: spans with the attributes that are asked for. Knows no span's meaning.

Any exporter's: one export request a line (the SDK's file exporter, the collector's), or one document for a whole file;
numbers in strings or bare. What cannot be read is named and passed over, so that a torn line costs itself alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvrelay.errors import NotFound
from kvrelay.tbt.arrays import KEY, taken_out

ENDINGS = (".jsonl", ".json")
MAX_PROBLEMS = 20
"""Problems that are told one by one; the rest is counted."""
MAX_DOCUMENT_BYTES = 1 << 30
"""A file that is one JSON document is read whole: beyond this it is refused. Lines have no limit on their sum."""

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class Malformed(Exception):
    """What was read is not what OTLP, or an attribute of ours, looks like."""


@dataclass(slots=True)
class Problems:
    """What could not be read. torn: last lines that end in the middle, as a killed process leaves them."""

    told: list[str] = field(default_factory=list)
    num_skipped: int = 0
    num_torn: int = 0

    def skip(self, where: str, why: str) -> None:
        self.num_skipped += 1
        if len(self.told) < MAX_PROBLEMS:
            self.told.append(f"{where}: {why}, skipped")

    def torn(self, where: str) -> None:
        self.num_torn += 1
        if len(self.told) < MAX_PROBLEMS:
            self.told.append(f"{where}: the last line ends in the middle, skipped")


@dataclass(frozen=True, slots=True)
class Span:
    """One span. Times in nanoseconds of the wall clock. where: FILE:LINE it was read from."""

    where: str
    trace_id: str
    span_id: str
    parent_id: str
    name: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Any]
    arrays: Sequence[list[float]] = ()
    """Those that attributes refer to, as `arrays.taken_out` left them."""

    def text(self, key: str, default: str = "") -> str:
        """An id of any type, as text."""
        value = self.attributes.get(key)
        return default if value is None else str(_scalar(value, key))

    def number(self, key: str) -> float | None:
        value = self.attributes.get(key)
        return None if value is None else _number(_scalar(value, key), key)

    def integer(self, key: str) -> int | None:
        value = self.number(key)
        return None if value is None else int(value)

    def floats(self, key: str) -> Floats:
        """Shape (n,); empty where the attribute is missing."""
        return np.array(self._values(key, "doubleValue", float), dtype=np.float64)

    def ints(self, key: str) -> Ints:
        """Shape (n,); empty where the attribute is missing."""
        return np.array(self._values(key, "intValue", int), dtype=np.int64)

    def _values(self, key: str, usual: str, convert: Callable[[Any], float]) -> list[float]:
        value = self.attributes.get(key)
        if isinstance(value, dict) and KEY in value:
            try:
                return self.arrays[value[KEY]]
            except (IndexError, TypeError):
                raise Malformed(f"{key} is not an array") from None
        return _values(value, key, usual, convert)


def files_of(paths: list[Path]) -> list[Path]:
    """The files themselves, and those below folders that end like traces. NotFound where there are none."""
    found: dict[Path, None] = {}
    for path in paths:
        if path.is_dir():
            below = sorted(p for p in path.rglob("*") if p.suffix in ENDINGS and p.is_file())
            if not below:
                raise NotFound(f"no {' or '.join(ENDINGS)} file in {path}", field="path")
            found.update(dict.fromkeys(below))
        elif path.is_file():
            found[path] = None
        else:
            raise NotFound(f"no such file or folder: {path}", field="path")
    return list(found)


def spans_of(path: Path, problems: Problems) -> Iterator[Span]:
    """Every span of a file, in its order. Memory: one line, or the file where it is one document."""
    try:
        with path.open("rb") as lines:
            first = lines.readline()
            if first.strip() and _parsed(first) is None and path.suffix == ".json" and lines.peek(1):
                yield from _document(path, problems)
                return
            lines.seek(0)
            for number, line in enumerate(lines, start=1):
                yield from _line(line, f"{path}:{number}", problems)
    except OSError as error:
        problems.skip(str(path), f"cannot be read ({error.strerror})")


def _document(path: Path, problems: Problems) -> Iterator[Span]:
    if path.stat().st_size > MAX_DOCUMENT_BYTES:
        problems.skip(str(path), f"one JSON document of more than {MAX_DOCUMENT_BYTES >> 20} MiB")
        return
    try:
        text, arrays = taken_out(path.read_bytes())
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        problems.skip(_at(path, error), "not JSON, neither the file nor its first line")
        return
    yield from _spans(document, arrays, str(path), problems)


def _at(path: Path, error: Exception) -> str:
    return f"{path}:{error.lineno}" if isinstance(error, json.JSONDecodeError) else str(path)


def _line(line: bytes, where: str, problems: Problems) -> Iterator[Span]:
    if not line.strip():
        return
    text, arrays = taken_out(line)
    document = _parsed(text)
    if document is None:
        if line.endswith(b"\n"):
            problems.skip(where, "not JSON")
        else:
            problems.torn(where)
        return
    yield from _spans(document, arrays, where, problems)


def _parsed(line: bytes) -> Any:
    """The value of a line; None where it is not JSON (null is of no use either)."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _spans(document: Any, arrays: list[list[float]], where: str, problems: Problems) -> Iterator[Span]:
    """Spans of one export request, or of a list of them."""
    for request in document if isinstance(document, list) else [document]:
        if not isinstance(request, dict) or not isinstance(request.get("resourceSpans"), list):
            if not _other_signal(request):
                problems.skip(where, "JSON, but not OTLP: no resourceSpans")
            continue
        try:
            raw_spans = [
                raw
                for resource in request["resourceSpans"]
                for scope in resource.get("scopeSpans") or []
                for raw in scope.get("spans") or []
            ]
        except (AttributeError, TypeError):
            problems.skip(where, "resourceSpans that hold no scopeSpans and spans")
            continue
        for raw in raw_spans:
            try:
                yield _span(raw, arrays, where)
            except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
                problems.skip(where, "a span without the fields of OTLP")


def _other_signal(request: Any) -> bool:
    """A collector writes metrics and logs in the same shape; they are none of our business."""
    return isinstance(request, dict) and bool({"resourceMetrics", "resourceLogs"} & set(request))


def _span(raw: dict[str, Any], arrays: list[list[float]], where: str) -> Span:
    return Span(
        where,
        str(raw["traceId"]),
        str(raw["spanId"]),
        str(raw.get("parentSpanId") or ""),
        str(raw["name"]),
        int(raw["startTimeUnixNano"]),
        int(raw["endTimeUnixNano"]),
        {entry["key"]: entry.get("value") for entry in raw.get("attributes") or ()},
        arrays,
    )


def _scalar(value: Any, key: str) -> Any:
    if isinstance(value, dict) and len(value) == 1:
        (kind, inner), *_ = value.items()
        if kind in {"stringValue", "intValue", "doubleValue", "boolValue"}:
            return inner
    raise Malformed(f"{key} is not one value")


def _number(value: Any, key: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise Malformed(f"{key} is not a number") from None


def _values(value: Any, key: str, usual: str, convert: Callable[[Any], float]) -> list[float]:
    """The numbers of an arrayValue; `usual` is the kind that they nearly always have, all of them."""
    if value is None:
        return []
    try:
        items = value["arrayValue"].get("values") or []
    except (AttributeError, KeyError, TypeError):
        raise Malformed(f"{key} is not an array") from None
    try:
        return [convert(item[usual]) for item in items]
    except (KeyError, TypeError, ValueError):
        return [convert(_number(_scalar(item, key), key)) for item in items]
