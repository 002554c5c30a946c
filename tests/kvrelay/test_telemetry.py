"""Spans built from a record, where they go, and log lines."""

from __future__ import annotations

import dataclasses
import io
import json
import logging
import time

import pytest
import structlog
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvrelay.telemetry import logging as our_logging
from kvrelay.telemetry import tracing
from kvrelay.telemetry.request_trace import AttemptTrace, Chunk, Interval, RequestTrace, build_request_spans

ACCEPTED_NS = 1_800_000_000_000_000_000


def an_attempt(**changes) -> AttemptTrace:
    base = {
        "ended_s": 2.0,
        "token_offsets_s": (0.5, 1.0, 2.0),
        "prefill_worker": "p1",
        "decode_worker": "d1",
        "queue": Interval(0.0, 0.1),
        "place": Interval(0.1, 0.11),
        "reserve": Interval(0.11, 0.12),
        "prefill": Interval(0.12, 0.5),
        "chunks": (Chunk(0.12, 0.3, 512), Chunk(0.3, 0.5, 488)),
        "push": Interval(0.3, 0.55),
        "decode": Interval(0.5, 2.0),
        "transport": "nixl",
        "num_blocks": 63,
        "num_bytes": 25_000_000,
        "exposed_s": 0.05,
    }
    return AttemptTrace(**(base | changes))


def a_record(*attempts: AttemptTrace, **changes) -> RequestTrace:
    base = {"request_id": "r1", "accepted_ns": ACCEPTED_NS, "outcome": "length", "model": "m", "prompt_tokens": 1000}
    return RequestTrace(**(base | {"attempts": attempts or (an_attempt(),)} | changes))


def built(record: RequestTrace) -> dict[str, list]:
    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("test")
    with tracer.start_as_current_span("Generate"):
        build_request_spans(tracer, record)
    spans: dict[str, list] = {}
    for span in exporter.get_finished_spans():
        spans.setdefault(span.name, []).append(span)
    return spans


def test_a_request_becomes_one_tree_with_explicit_times():
    spans = built(a_record())
    (root,) = spans["Generate"]
    assert {name: len(found) for name, found in spans.items()} == {
        "Generate": 1,
        "queue": 1,
        "place": 1,
        "reserve": 1,
        "prefill": 1,
        "prefill.chunk": 2,
        "kv.push": 1,
        "decode": 1,
    }
    (prefill,) = spans["prefill"]
    parents = {name: {s.parent.span_id for s in found} for name, found in spans.items() if name != "Generate"}
    assert parents.pop("prefill.chunk") == {prefill.context.span_id}
    assert all(ids == {root.context.span_id} for ids in parents.values())
    assert (prefill.start_time, prefill.end_time) == (ACCEPTED_NS + 120_000_000, ACCEPTED_NS + 500_000_000)
    assert root.attributes["kvrelay.request.outcome"] == "length"
    assert root.attributes["gen_ai.usage.output_tokens"] == 3
    assert root.attributes["kvrelay.request.ttft_s"] == 0.5


def test_the_push_span_says_what_moved_and_how_fast():
    (push,) = built(a_record())["kv.push"]
    assert push.attributes == {
        "kvrelay.attempt": 0,
        "kvrelay.worker.id": "p1",
        "kvrelay.push.transport": "nixl",
        "kvrelay.push.blocks": 63,
        "kvrelay.push.bytes": 25_000_000,
        "kvrelay.push.exposed_s": 0.05,
        "kvrelay.push.gb_per_s": pytest.approx(0.1),
    }


def test_decode_is_cut_into_segments_of_512_tokens_that_hold_all_offsets():
    offsets = tuple(0.5 + i / 1000 for i in range(1300))
    segments = built(a_record(an_attempt(token_offsets_s=offsets, ended_s=1.9, decode=Interval(0.5, 1.9))))["decode"]
    assert [len(s.attributes["kvrelay.decode.token_offsets_s"]) for s in segments] == [512, 512, 276]
    assert sum((s.attributes["kvrelay.decode.token_offsets_s"] for s in segments), ()) == offsets
    assert [s.attributes["kvrelay.decode.first_index"] for s in segments] == [0, 512, 1024]
    assert [s.start_time for s in segments[1:]] == [s.end_time for s in segments[:-1]]
    assert segments[-1].end_time == ACCEPTED_NS + 1_900_000_000


def test_only_what_happened_has_a_span_and_a_lost_worker_s_open_span_is_closed_as_lost():
    early = built(a_record(an_attempt(**dict.fromkeys(("place", "reserve", "prefill", "push", "decode")))))
    assert set(early) == {"Generate", "queue"}
    lost = built(a_record(an_attempt(lost_worker="d1"), outcome="Aborted"))
    assert lost["decode"][0].attributes["kvrelay.worker.lost"] is True
    assert "kvrelay.worker.lost" not in lost["reserve"][0].attributes
    assert "kvrelay.worker.lost" not in lost["prefill"][0].attributes


def test_a_moved_request_shows_both_attempts_and_the_move_between_them():
    lost = an_attempt(ended_s=1.5, token_offsets_s=(0.5, 1.0), decode=Interval(0.5, 1.5), lost_worker="d1")
    lost = dataclasses.replace(lost, cause="worker_lost", migrated_s=1.8)
    moved = {"number": 1, "first_index": 2, "token_offsets_s": (1.8, 2.0), "decode_worker": "d2"}
    spans = built(a_record(lost, an_attempt(**moved, queue=Interval(1.5, 1.6), decode=Interval(1.8, 2.0))))
    (root,), (migrate,) = spans["Generate"], spans["migrate"]
    assert root.attributes["kvrelay.request.migrations"] == 1
    assert root.attributes["gen_ai.usage.output_tokens"] == 4
    assert migrate.attributes == {
        "kvrelay.attempt": 0,
        "kvrelay.worker.id": "d1",
        "kvrelay.migrate.cause": "worker_lost",
        "kvrelay.migrate.tokens": 2,
    }
    assert (migrate.start_time, migrate.end_time) == (ACCEPTED_NS + 1_500_000_000, ACCEPTED_NS + 1_800_000_000)
    first, second = spans["decode"]
    assert (first.attributes["kvrelay.worker.lost"], first.status.is_ok) == (True, False)
    assert "kvrelay.worker.lost" not in second.attributes
    found = [(s.attributes["kvrelay.attempt"], s.attributes["kvrelay.decode.first_index"]) for s in (first, second)]
    assert found == [(0, 0), (1, 2)]
    assert all(span.parent.span_id == root.context.span_id for span in (migrate, first, second))


def test_without_configuration_nothing_is_built_but_the_caller_s_trace_is_passed_on():
    off = tracing.setup("coordinator")
    parent = trace.NonRecordingSpan(trace.SpanContext(1, 2, True, trace.TraceFlags(1)))
    span = off.provider.get_tracer("t").start_span("x", context=trace.set_span_in_context(parent))
    assert tracing.traceparent_of(span) == "00-00000000000000000000000000000001-0000000000000002-01"
    build_request_spans(off.provider.get_tracer("t"), a_record(), span)
    assert tracing.traceparent_of() == ""
    assert off.close()


def test_spans_go_to_a_file_of_otlp_json_lines(tmp_path):
    on = tracing.setup("coordinator", trace_dir=str(tmp_path / "traces"))
    tracer = on.provider.get_tracer("t")
    with tracer.start_as_current_span("Generate"):
        build_request_spans(tracer, a_record())
    assert on.close()
    (file,) = (tmp_path / "traces").iterdir()
    assert file.name.startswith("coordinator-")
    names = set()
    for line in file.read_text().splitlines():
        for resource in json.loads(line)["resourceSpans"]:
            names |= {span["name"] for scope in resource["scopeSpans"] for span in scope["spans"]}
    assert {"Generate", "kv.push", "prefill.chunk", "decode"} <= names


def test_a_dead_collector_does_not_hold_the_exit():
    on = tracing.setup("coordinator", otlp_endpoint="http://127.0.0.1:9")
    with on.provider.get_tracer("t").start_as_current_span("x"):
        pass
    started = time.monotonic()
    on.close(0.5)
    assert time.monotonic() - started < 1.5


@pytest.fixture
def _restored_logging():
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


@pytest.mark.usefixtures("_restored_logging")
def test_lines_for_people_are_key_value_without_colour_when_not_a_terminal(monkeypatch):
    monkeypatch.delenv("KVRELAY_LOG", raising=False)
    stream = io.StringIO()
    our_logging.setup(stream=stream, role="decode")
    our_logging.get_logger("x").info("worker registered", worker_id="d1")
    logging.getLogger("y").warning("from %s", "elsewhere")
    first, second = stream.getvalue().splitlines()
    assert "worker registered" in first
    assert "worker_id=d1" in first
    assert "role=decode" in first
    assert "from elsewhere" in second
    assert "\x1b" not in stream.getvalue()


@pytest.mark.usefixtures("_restored_logging")
def test_json_lines_hold_the_fields_and_the_traceback(monkeypatch):
    monkeypatch.setenv("KVRELAY_LOG", "json")
    stream = io.StringIO()
    our_logging.setup(stream=stream, role="decode")
    our_logging.get_logger("x").info("ready", port=7)
    try:
        raise ValueError("boom")
    except ValueError:
        logging.getLogger("y").exception("failed")
    first, second = (json.loads(line) for line in stream.getvalue().splitlines())
    assert (first["event"], first["port"], first["role"], first["level"]) == ("ready", 7, "decode", "info")
    assert "ValueError: boom" in second["exception"]
