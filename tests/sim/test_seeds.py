"""The simulator as it is used: seeds that find nothing, a seed that stays the same run, a fault that is found."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvtransfer import receiver_steps
from sim.cluster import run_seed
from sim.scenario import scenario_of

ROOT = Path(__file__).parents[2]
SEEDS = 100
FAULTS = ("crash", "point", "pause", "jump", "cut", "clog", "vanish", "write", "coordinator", "drain", "no_prefill")
COUNTERS = (
    *("migrated", "quarantined", "refused_stale", "write_failed", "duplicate_part"),
    *("matched_tokens", "cached_tokens", "local_prefills", "forked", "blocks_shared", "blocks_copied"),
    *("preempted_swap", "preempted_recompute"),
)
SEED_WITH_MUCH = 18
"""Cuts, deaths at named points, failed writes, hits in caches, several sequences of a prompt."""
SEED_THAT_MOVES = 223
"""A worker's grace ends before its work does, which happens in few seeds."""
IDS = re.compile(r"[0-9a-f]{32}|0x[0-9a-f]+")
"""Names of sessions are drawn by the coordinator and decide nothing; objects have addresses."""


def simulate(*arguments: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "sim", "--json", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=290, check=False)
    assert done.stdout, done.stderr[-3000:]
    return done.returncode, json.loads(done.stdout)


@pytest.mark.timeout(300)  # half a minute on a machine with nothing else to do
def test_a_hundred_seeds_find_nothing_and_every_kind_of_fault_has_happened() -> None:
    code, result = simulate("--seeds", str(SEEDS), "--jobs", str(os.cpu_count() or 1))
    assert (code, result["violations"], result["seeds"]) == (0, [], SEEDS)
    assert set(result["requests"]) >= {"exact", "left", "Unavailable"}
    for fault in FAULTS:
        assert result["faults"].get(fault), f"no {fault} in {SEEDS} seeds"
    for counter in COUNTERS:
        assert result["counters"].get(counter), f"nobody counted {counter} in {SEEDS} seeds"


def test_a_seed_is_the_same_run_every_time() -> None:
    traces = []
    for _ in range(2):
        lines: list[str] = []
        outcome = run_seed(SEED_WITH_MUCH, lines.append)
        seen = (outcome.steps, outcome.virtual_s, outcome.outcomes, outcome.faults, outcome.counters)
        traces.append((seen, [IDS.sub("-", line) for line in lines]))
    assert traces[0] == traces[1]
    assert traces[0][0][0] > 1000
    assert traces[0][0][4]["matched_tokens"] and traces[0][0][4]["forked"]


def test_what_a_worker_has_near_the_end_of_its_grace_moves() -> None:
    outcome = run_seed(SEED_THAT_MOVES)
    assert (outcome.violation, outcome.counters["moved"]) == ("", 1)


def test_without_faults_every_stream_is_exact() -> None:
    calm = [seed for seed in range(60) if not scenario_of(seed).faults][:4]
    for seed in calm:
        outcome = run_seed(seed)
        assert (outcome.violation, set(outcome.outcomes)) == ("", {"exact"})


def test_memory_that_is_reused_too_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault of the simulator's own test: blocks come back as soon as the writer's link is closed."""
    monkeypatch.setattr(receiver_steps, "PEER_GONE_S", 0.0)
    one_sided = (s for s in range(400) if scenario_of(s).transport == "nixl" and "write" in scenario_of(s).faults)
    for seed in one_sided:
        outcome = run_seed(seed)
        if outcome.violation:
            assert "may be written to" in outcome.violation or "lands in block" in outcome.violation
            assert outcome.recent
            return
    pytest.fail("nobody noticed")
