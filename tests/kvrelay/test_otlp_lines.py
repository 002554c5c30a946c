"""Our lines of OTLP JSON say what the stock exporter's say."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from opentelemetry import trace
from opentelemetry.exporter.otlp.json.file.trace_exporter import FileSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
)

from kvrelay.telemetry.otlp_lines import LinesExporter, value_text

CALLER = SpanContext(7 << 70, 5, True, TraceFlags(1), TraceState([("vendor", "a b")]))


def some_spans() -> tuple[ReadableSpan, ...]:
    memory = InMemorySpanExporter()
    provider = TracerProvider(resource=Resource({"service.name": "x", "pid": 3}), shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(memory))
    tracer, other = provider.get_tracer("kvrelay"), provider.get_tracer("other")
    parent = trace.set_span_in_context(NonRecordingSpan(CALLER))
    root = tracer.start_span(
        'a "name" with \u00fc', context=parent, kind=SpanKind.SERVER, links=[Link(CALLER, {"l": 1})]
    )
    root.set_attributes({"text": "line\nbreak", "flag": True, "number": -3, "share": 0.25})
    child = tracer.start_span("child", context=trace.set_span_in_context(root))
    child.set_attributes({"floats": (0.1, 1e-9, 2.0), "ints": (1, 2**40), "none": (), "words": ("a", 'b"')})
    child.add_event("late", {"seconds": 0.5}, 12345)
    child.set_status(Status(StatusCode.ERROR, "lost"))
    child.end()
    other.start_span("elsewhere").end()
    root.end()
    return memory.get_finished_spans()


def plain(line: str) -> Any:
    """Without what OTLP takes for the same: zeros, empty lists, schema addresses."""

    def clean(value: Any) -> Any:
        if isinstance(value, dict):
            kept = {key: clean(each) for key, each in value.items() if key != "schemaUrl"}
            return {key: each for key, each in kept.items() if each not in ([], {}, 0, "", None) or key in KEPT}
        return [clean(each) for each in value] if isinstance(value, list) else value

    return clean(json.loads(line))


KEPT = {"value", "arrayValue", "doubleValue", "intValue", "boolValue", "stringValue"}


def test_a_batch_is_the_same_as_the_stock_exporters(tmp_path: Path) -> None:
    spans = some_spans()
    stock, ours = FileSpanExporter(tmp_path / "stock.jsonl"), LinesExporter(tmp_path / "ours.jsonl")
    assert stock.export(spans) is ours.export(spans) is SpanExportResult.SUCCESS
    stock.shutdown()
    ours.shutdown()
    theirs, mine = (plain((tmp_path / name).read_text()) for name in ("stock.jsonl", "ours.jsonl"))
    for link in theirs["resourceSpans"][0]["scopeSpans"][0]["spans"][1].get("links", []):
        link.pop("flags", None)
    assert mine == theirs


def test_numbers_that_json_does_not_have_are_words() -> None:
    told = [json.loads(value_text(value)) for value in (math.nan, math.inf, -math.inf)]
    assert told == [{"doubleValue": "NaN"}, {"doubleValue": "Infinity"}, {"doubleValue": "-Infinity"}]
    assert json.loads(value_text((1.0, math.inf))) == {
        "arrayValue": {"values": [{"doubleValue": 1.0}, {"doubleValue": "Infinity"}]}
    }


def test_a_file_that_cannot_be_written_is_a_failure_and_no_exception(tmp_path: Path) -> None:
    exporter = LinesExporter(tmp_path / "a.jsonl")
    exporter.shutdown()
    assert exporter.export(some_spans()) is SpanExportResult.FAILURE
