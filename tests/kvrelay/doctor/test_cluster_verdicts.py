"""What the doctor says of a running cluster."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvrelay.doctor.cluster import Worker, judge_cluster, judge_mixed, judge_reached, judge_worker
from kvrelay.doctor.finding import Verdict

OK, WARNING, PROBLEM = Verdict
DECODE = Worker(
    worker_id="decode-0",
    role="decode",
    address="127.0.0.1:7001",
    model="m (0123abcd)",
    layout="30 layers x 3 heads of 64, bfloat16, blocks of 16",
    transport="nixl",
    executor="torch",
    protocol_version="3",
    prefix_cache=True,
    verify_kv=False,
    silent_s=0.2,
    draining=False,
    quarantined=0,
    health="SERVING",
    round_trip_s=0.0012,
    clock_offset_s=-12.5,
    clock_error_s=0.0004,
)
PREFILL = replace(DECODE, worker_id="prefill-0", role="prefill")


def test_a_coordinator_is_told_with_its_round_trips() -> None:
    finding = judge_reached("h:1", [0.003, 0.001, 0.002], "")
    assert (finding.verdict, finding.what) == (OK, "h:1 answers in 1.0 ms (of 3), 3.0 at worst")
    assert judge_reached("h:1", [0.051, 0.06], "").verdict is WARNING
    silent = judge_reached("h:1", [], "connection refused")
    assert (silent.verdict, silent.what) == (PROBLEM, "h:1 does not answer: connection refused")


def test_a_good_cluster_is_good() -> None:
    findings = judge_cluster([PREFILL, DECODE])
    assert [(f.check, f.verdict, f.what) for f in findings] == [
        ("workers", OK, "1 prefill, 1 decode"),
        ("prefill-0", OK, "prefill, heard 0.2 s ago, answers in 1.2 ms, clock known to 0.4 ms"),
        ("decode-0", OK, "decode, heard 0.2 s ago, answers in 1.2 ms, clock known to 0.4 ms"),
    ]
    assert findings[2].figures == {
        "silent_s": 0.2,
        "round_trip_s": 0.0012,
        "clock_offset_s": -12.5,
        "clock_error_s": 0.0004,
    }


def test_a_role_without_workers_is_a_problem_that_says_what_to_start() -> None:
    finding = judge_cluster([PREFILL])[0]
    assert (finding.verdict, finding.what) == (PROBLEM, "1 prefill, 0 decode: no request can be served")
    assert finding.advice == "start one: kvrelay decode --coordinator HOST:PORT"


@pytest.mark.parametrize(
    ("change", "verdict", "what"),
    [
        ({"silent_s": 1.2}, OK, ""),
        ({"silent_s": 1.3}, WARNING, "silent: gets nothing new"),
        ({"silent_s": 2.6}, PROBLEM, "silent: its requests move to others"),
        ({"health": "NOT_SERVING"}, PROBLEM, "says NOT_SERVING: nothing moves although there is work"),
        ({"health": "refused", "round_trip_s": None}, WARNING, "does not answer from here: refused"),
        ({"round_trip_s": 0.08}, WARNING, "slow to answer"),
        ({"clock_error_s": None}, OK, ""),
        (
            {"clock_error_s": 0.006},
            WARNING,
            "its clock is known to 6 ms only, and so are causes of late tokens",
        ),
        ({"draining": True}, WARNING, "draining: takes nothing new"),
        ({"draining": True, "health": "NOT_SERVING"}, WARNING, "draining: takes nothing new"),
        ({"prefix_cache": False}, WARNING, "caches no prompts"),
        ({"quarantined": 3}, WARNING, "3 blocks quarantined"),
    ],
    ids=str,
)
def test_a_worker_is_judged_by_what_is_not_as_it_should_be(
    change: dict[str, object], verdict: Verdict, what: str
) -> None:
    finding = judge_worker(replace(DECODE, **change))  # type: ignore[arg-type]  # one field each
    assert finding.verdict is verdict
    assert finding.what.partition("; ")[2] == what
    assert bool(finding.advice) == (verdict is not OK)


def test_everything_about_a_worker_is_said_and_the_worst_decides() -> None:
    finding = judge_worker(replace(DECODE, silent_s=5.0, prefix_cache=False))
    assert finding.verdict is PROBLEM
    said = "silent: its requests move to others; caches no prompts"
    assert finding.what == f"decode, heard 5.0 s ago, answers in 1.2 ms, clock known to 0.4 ms; {said}"
    assert finding.advice == "see its log, and kvrelay health 127.0.0.1:7001; start it without --no-prefix-cache"


def test_what_differs_between_workers_is_a_problem_that_names_both_values() -> None:
    assert judge_mixed([PREFILL, DECODE]) == []
    (finding,) = judge_mixed([PREFILL, DECODE, replace(DECODE, worker_id="decode-1", transport="grpc")])
    assert finding.verdict is PROBLEM
    assert finding.what == "transport differs: nixl: prefill-0, decode-0; grpc: decode-1"
    assert finding.advice == "start all workers with the same transport"


def test_decode_that_checks_blocks_needs_prefill_that_sends_checksums() -> None:
    (finding,) = judge_mixed([PREFILL, replace(DECODE, verify_kv=True)])
    assert finding.what == "decode-0 check KV blocks, prefill-0 send no checksums"
    assert judge_mixed([replace(PREFILL, verify_kv=True), DECODE]) == []
