"""The report, the comparison and their tables."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from support import otlp_lines as otlp

from kvrelay.gaps import CAUSES
from kvrelay.tbt.compare import compare
from kvrelay.tbt.join import Joined, join
from kvrelay.tbt.reader import read
from kvrelay.tbt.report import report, slowest, worst_gaps
from kvrelay.tbt.view import causes_line, compare_view, report_view, step_line


def joined(tmp_path: Path, *spans: dict[str, Any]) -> Joined:
    (tmp_path / "a.jsonl").write_text("".join(otlp.line(span) for span in spans))
    return join(read([tmp_path]))


def steps_of(count: int, late: dict[int, dict[str, float]] | None = None) -> tuple[list[dict[str, float]], list[float]]:
    """Records from 1.0 s on, 10 ms each, those of `late` (by id) changed; and the moment that each ends."""
    now, records, ends = 1.0, [], []
    for number in range(1, count + 1):
        record = {"start_s": now, "forward_s": 0.01, "batch": 2, "blocks_used": 7, **(late or {}).get(number, {})}
        now += record["forward_s"]
        records.append(record)
        ends.append(now)
    return records, ends


def two_streams(tmp_path: Path) -> Joined:
    """Two streams over 60 steps; step 30 also computes a prompt, and stream b misses steps 40 to 44."""
    late = {30: {"forward_s": 0.11, "prefill_tokens": 512, "transfers": 3}, 42: {"preemptions": 1}}
    late |= {10: {"forward_s": 0.11, "prefill_tokens": 512}}
    records, ends = steps_of(60, late)
    a, b = list(range(20, 60)), [step for step in range(20, 60) if not 40 <= step < 45]
    return joined(
        tmp_path,
        otlp.root("a", "1", accepted_s=1.0),
        otlp.piece("prefill", "1", 0.0, 0.1, "prefill-0"),
        otlp.decode("1", [0.1] + [ends[step - 1] - 1.0 for step in a], [0, *a]),
        otlp.root("b", "2", accepted_s=1.0),
        otlp.decode("2", [ends[step - 1] - 1.0 for step in b], b),
        otlp.steps(records),
    )


def test_a_report_counts_and_says_percentiles_for_all_and_by_worker(tmp_path: Path) -> None:
    made = report(two_streams(tmp_path))
    assert {key: made[key] for key in ("files", "requests", "tokens", "gaps", "steps", "problems")} == {
        "files": 1,
        "requests": 2,
        "tokens": 76,
        "gaps": 74,
        "steps": 60,
        "problems": [],
    }
    assert set(made["left_out"].values()) == {0}
    assert made["overall"]["ttft_ms"]["p50"] == pytest.approx((100.0 + 300.0) / 2)
    assert made["overall"]["tbt_ms"]["p50"] == pytest.approx(10.0)
    assert made["overall"]["tbt_ms"]["max"] == pytest.approx(200.0)
    decode, prefill = made["workers"]
    assert (decode["worker"], decode["role"], decode["gaps"], decode["streams"]) == ("decode-0", "decode", 74, 1)
    assert decode["ttft_ms"]["max"] == pytest.approx(300.0)
    assert (prefill["worker"], prefill["gaps"], prefill["tbt_ms"]) == ("prefill-0", 0, None)
    assert prefill["ttft_ms"]["max"] == pytest.approx(100.0)


def test_shares_of_causes_add_up_to_one_and_seconds_to_the_gaps(tmp_path: Path) -> None:
    made = two_streams(tmp_path)
    told = report(made)
    assert sum(told["causes"]["shares"].values()) == pytest.approx(1.0, abs=1e-4)
    assert sum(told["slowest"]["shares"].values()) == pytest.approx(1.0, abs=1e-4)
    assert sum(told["causes"]["seconds"].values()) == pytest.approx(made.gaps.gap_s.sum(), abs=1e-5)
    assert sum(told["causes"]["ms_per_gap"].values()) * 74 == pytest.approx(made.gaps.gap_s.sum() * 1000, abs=0.1)
    assert list(told["causes"]["shares"]) == [cause.value for cause in CAUSES]


def test_the_worst_gaps_name_their_cause_and_what_the_batch_was_doing(tmp_path: Path) -> None:
    told = report(two_streams(tmp_path), top=3)["worst"]
    first, prompt, preempted = told
    assert (first["request_id"], first["token"], first["gap_ms"]) == ("a", 1, pytest.approx(200.0))
    assert (prompt["gap_ms"], prompt["streams"], prompt["step"]["id"]) == (pytest.approx(110.0), 2, 30)
    assert next(iter(prompt["causes_ms"])) == "prefill_in_step"
    assert prompt["causes_ms"]["prefill_in_step"] == pytest.approx(100.0, rel=0.1)
    assert (prompt["step"]["prefill_tokens"], prompt["step"]["transfers"], prompt["step"]["batch"]) == (512, 3, 2)
    assert (preempted["request_id"], preempted["gap_ms"]) == ("b", pytest.approx(60.0))
    assert next(iter(preempted["causes_ms"])) == "swap_or_preemption"
    assert preempted["causes_ms"]["swap_or_preemption"] == pytest.approx(50.0)
    assert preempted["step"]["steps_without_it"] == 5
    assert (preempted["step"]["preemptions"], preempted["step"]["preemptions_meanwhile"]) == (0, 1)
    assert step_line(prompt) == "step 30: 110.00 ms, batch 2, 512 prompt tokens, 3 transfers, 2 streams waited"
    assert step_line(preempted) == "step 45: 10.00 ms, batch 2, 1 preempted, 5 steps without it, 2 streams waited"
    assert step_line({"step": None, "step_id": 0}) == "none: prefill sampled the token"
    assert causes_line(preempted) == "swap_or_preemption 50.00, base_compute 10.00"


def test_gaps_that_one_step_ended_take_one_place_among_the_worst(tmp_path: Path) -> None:
    made = two_streams(tmp_path)
    steps = [made.step(worst.token).step_id for worst in worst_gaps(made, 20)]
    assert (len(steps), len(set(steps))) == (20, 20)
    assert worst_gaps(made, 0) == []


def test_the_slowest_hundredth_is_never_nothing_where_there_are_gaps() -> None:
    assert slowest(np.arange(1000.0)).tolist() == list(range(999, 989, -1))
    assert slowest(np.array([1.0, 3.0, 2.0])).tolist() == [1]
    assert slowest(np.empty(0)).tolist() == []


def test_one_token_has_a_ttft_and_no_gap(tmp_path: Path) -> None:
    told = report(joined(tmp_path, otlp.root("r", "1"), otlp.decode("1", [0.25], [0])))
    assert told["overall"]["ttft_ms"]["max"] == pytest.approx(250.0)
    assert (told["overall"]["tbt_ms"], told["gaps"], told["worst"], told["slowest"]["from_ms"]) == (None, 0, [], None)
    assert "TTFT" in shown(report_view(told))


def test_the_table_says_what_was_left_out(tmp_path: Path) -> None:
    made = joined(
        tmp_path,
        otlp.decode("1", [0.1, 0.2], [0, 77]),
        otlp.decode("1", [9.0], [78], first_index=512),
        otlp.span("GET /", {}, "x"),
    )
    text = shown(report_view(report(made)))
    assert (
        "left out or incomplete: requests without own span 1, gaps with missing tokens 1, tokens without step 2" in text
    )
    assert "step 77, not recorded" in text


def test_a_comparison_sets_latencies_and_causes_beside_each_other(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "2").mkdir()
    a = report(joined(tmp_path / "1", otlp.root("r", "1"), otlp.decode("1", [0.1, 0.2, 0.3], [0, 8, 9])))
    b = report(
        joined(
            tmp_path / "2",
            otlp.root("r", "1"),
            otlp.decode("1", [0.1, 0.5], [0, 9], sent_s=[0.1, 0.6]),
        )
    )
    rows = {row.name: row for row in compare(a, b)}
    tbt = rows["TBT p50"]
    assert (tbt.a, tbt.b, tbt.difference, tbt.change) == (100.0, 500.0, 400.0, 4.0)
    assert (rows["gaps"].a, rows["gaps"].b) == (2, 1)
    assert (rows["slow_reader"].a, rows["slow_reader"].b, rows["slow_reader"].change) == (0.0, 95.0, None)
    assert (rows["unexplained"].a, rows["unexplained"].b) == (100.0, 400.0)
    assert "migration" not in rows  # nothing in either
    assert rows["TBT p50"].to_json()["difference"] == 400.0
    text = shown(compare_view(list(rows.values()), "before", "after"))
    assert "+400.000" in text and "+400.0%" in text and "A: before" in text


def test_a_figure_that_one_recording_lacks_has_no_difference(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "2").mkdir()
    a = report(joined(tmp_path / "1", otlp.root("r", "1"), otlp.decode("1", [0.1], [0])))
    b = report(joined(tmp_path / "2", otlp.root("r", "1"), otlp.decode("1", [0.1, 0.2], [0, 0])))
    row = next(row for row in compare(a, b) if row.name == "TBT p99")
    assert (row.a, row.b, row.difference, row.change) == (None, 100.0, None, None)
    assert "-" in shown(compare_view([row], "a", "b"))


def shown(view: Any) -> str:
    out = io.StringIO()
    Console(file=out, width=200).print(view)
    return out.getvalue()
