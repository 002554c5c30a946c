"""Requests, segments and steps out of spans."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from support import otlp_lines as otlp

from kvrelay.tbt.reader import Recording, read
from kvrelay.telemetry import tracing


def recorded(tmp_path: Path, *spans: dict) -> Recording:
    (tmp_path / "a.jsonl").write_text("".join(otlp.line(span) for span in spans))
    return read([tmp_path])


def test_a_request_is_put_together_whatever_order_its_spans_come_in(tmp_path: Path) -> None:
    found = recorded(
        tmp_path,
        otlp.decode("1", [3.0], [9], first_index=2),
        otlp.piece("kv.push", "1", 0.5, 1.1, "p0", **{"kvrelay.push.exposed_s": 0.1}),
        otlp.root("r1", "1", accepted_s=77.0),
        otlp.decode("1", [1.0, 2.0], [0, 8], sent_s=[1.1, 2.1], batch=[1, 4]),
        otlp.piece("queue", "1", 0.0, 0.2),
    )
    (request,) = found.requests
    assert (request.request_id, request.accepted_s, request.outcome) == ("r1", 77.0, "length")
    first, second = request.segments
    assert (first.first_index, first.offsets_s.tolist(), first.sent_s.tolist()) == (0, [1.0, 2.0], [1.1, 2.1])
    assert (first.step_ids.tolist(), first.batch.tolist(), first.worker) == ([0, 8], [1, 4], "decode-0")
    assert (second.first_index, second.step_ids.tolist()) == (2, [9])
    pushed = [piece for piece in request.pieces if piece.name == "kv.push"]
    assert [(piece.start_s, piece.end_s, piece.exposed_s, piece.worker) for piece in pushed] == [(0.5, 1.1, 0.1, "p0")]
    assert (found.num_rootless, found.num_other, found.problems.told) == (0, 0, [])


def test_what_the_sdk_writes_is_read(tmp_path: Path) -> None:
    made = tracing.setup("coordinator", str(tmp_path))
    tracer = made.provider.get_tracer("test")
    with tracer.start_as_current_span("Generate", attributes={"kvrelay.request.id": "r"}) as span:
        span.set_attribute("kvrelay.request.accepted_s", 5.5)
        arrays = {"kvrelay.decode.token_offsets_s": [0.0, 1.5], "kvrelay.decode.step_ids": [0, 7]}
        with tracer.start_as_current_span("decode", attributes={"kvrelay.worker.id": "d", **arrays}):
            pass
    assert made.close()
    (request,) = read([tmp_path]).requests
    assert (request.request_id, request.accepted_s, request.segments[0].worker) == ("r", 5.5, "d")
    assert request.segments[0].offsets_s.tolist() == [0.0, 1.5]
    assert request.segments[0].step_ids.tolist() == [0, 7]


def test_two_requests_of_one_trace_stay_two(tmp_path: Path) -> None:
    spans = [otlp.root("a", "1"), otlp.root("b", "2"), otlp.decode("1", [1.0], [0]), otlp.decode("2", [2.0], [0])]
    for span in spans:
        span["traceId"] = "caller"
    found = recorded(tmp_path, *spans)
    assert [(r.request_id, r.segments[0].offsets_s.tolist()) for r in found.requests] == [("a", [1.0]), ("b", [2.0])]


def test_a_span_that_two_files_hold_counts_once(tmp_path: Path) -> None:
    text = otlp.line(otlp.root("r", "1"), otlp.decode("1", [1.0, 2.0], [0, 1]), otlp.steps([{"start_s": 1.0}]))
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text(text)
    found = read([tmp_path])
    assert (len(found.requests), len(found.requests[0].segments), found.num_spans) == (1, 1, 3)
    assert found.steps["decode-0", "i0"].ids.tolist() == [1]


def test_tokens_whose_root_is_missing_are_kept_under_their_trace(tmp_path: Path) -> None:
    found = recorded(tmp_path, otlp.decode("1", [1.0], [0]))
    assert (found.requests[0].request_id, found.requests[0].accepted_s, found.num_rootless) == (
        "trace 00000000",
        None,
        1,
    )


def test_steps_of_a_life_are_joined_by_rising_id_and_lives_kept_apart(tmp_path: Path) -> None:
    found = recorded(
        tmp_path,
        otlp.steps([{"start_s": 3.0, "batch": 2}, {"start_s": 4.0}], first_id=3, clock_offset_s=0.5),
        otlp.steps([{"start_s": 1.0}, {"start_s": 2.0, "forward_s": 0.25}], first_id=1, clock_offset_s=0.25),
        otlp.steps([{"start_s": 9.0}], incarnation="i1"),
    )
    steps = found.steps["decode-0", "i0"]
    assert steps.ids.tolist() == [1, 2, 3, 4]
    assert steps.columns["start_s"].tolist() == [1.0, 2.0, 3.0, 4.0]
    assert steps.columns["forward_s"].tolist() == [0.0, 0.25, 0.0, 0.0]
    assert steps.columns["batch"].tolist() == [0, 0, 2, 0]
    assert steps.clock_offset_s.tolist() == [0.25, 0.25, 0.5, 0.5]
    assert steps.rows(np.array([4, 1, 99, 0])).tolist() == [3, 0, -1, -1]
    assert found.steps["decode-0", "i1"].ids.tolist() == [1]


def test_a_recording_without_writes_and_steps_says_less_and_is_read(tmp_path: Path) -> None:
    span = otlp.decode("1", [1.0, 2.0], [])
    bare = ("kvrelay.decode.sent_s", "kvrelay.decode.batch", "kvrelay.decode.step_ids")
    span["attributes"] = [entry for entry in span["attributes"] if entry["key"] not in bare]
    (segment,) = recorded(tmp_path, otlp.root("r", "1"), span).requests[0].segments
    assert (segment.sent_s.tolist(), segment.step_ids.tolist(), segment.batch.tolist()) == ([1.0, 2.0], [0, 0], [0, 0])


def test_a_span_of_ours_with_unequal_arrays_is_named_and_passed_over(tmp_path: Path) -> None:
    odd = otlp.steps([{"start_s": 1.0}, {"start_s": 2.0}])
    for entry in odd["attributes"]:
        if entry["key"] == "kvrelay.steps.batch":
            entry["value"] = otlp.any_value([1])
    found = recorded(
        tmp_path, otlp.root("r", "1"), otlp.decode("1", [1.0], [1, 2]), otlp.decode("1", [5.0], [5], first_index=1), odd
    )
    assert [part.first_index for part in found.requests[0].segments] == [1]
    assert found.steps == {}
    assert found.problems.told == [
        f"{tmp_path / 'a.jsonl'}:2: span decode: kvrelay.decode.step_ids has 2 values for 1 tokens, skipped",
        f"{tmp_path / 'a.jsonl'}:4: span worker.steps: kvrelay.steps.batch has 1 values for 2 steps, skipped",
    ]


def test_times_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    found = recorded(tmp_path, otlp.root("r", "1"), otlp.decode("1", [1.0, float("nan"), 3.0], [0, 1, 2]))
    assert found.requests[0].segments == ()
    assert found.problems.told[0].endswith("token_offsets_s holds a number that is not finite, skipped")


def test_ids_too_big_for_any_counter_are_refused(tmp_path: Path) -> None:
    found = recorded(tmp_path, otlp.root("r", "1"), otlp.decode("1", [1.0], [1 << 70]))
    assert (found.requests[0].segments, found.problems.num_skipped) == ((), 1)


def test_spans_of_others_are_counted_and_nothing_more(tmp_path: Path) -> None:
    found = recorded(tmp_path, otlp.span("decode", {"video": "h264"}, "x"), otlp.span("GET /", {}, "y"))
    assert (found.requests, found.num_other, found.num_spans, found.problems.told) == ((), 2, 2, [])
