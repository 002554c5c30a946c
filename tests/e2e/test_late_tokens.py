"""A cluster that records, disturbed on purpose, and what `kvrelay tbt` says of it afterwards."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from support.cluster import running_cluster, standing_still

from kvrelay.client import Client

pytestmark = pytest.mark.e2e
STEP_S = 0.02


def said(traces: Path, *flags: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "kvrelay.cli.main", "tbt", str(traces), "--json", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def streams(target: str, count: int, tokens: int, started: threading.Barrier) -> list[threading.Thread]:
    """Each meets the others at `started` once it has its tenth token."""

    def one(number: int) -> None:
        with Client(target) as client:
            for index, _ in enumerate(client.generate([number + 1] * 40, max_tokens=tokens, ignore_eos=True)):
                if index == 10:
                    started.wait(60)

    threads = [threading.Thread(target=one, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    return threads


def test_a_stopped_worker_is_named_first_and_with_its_time(tmp_path: Path) -> None:
    traces = tmp_path / "traces"
    flags = ("--executor", "hash", "--step-seconds", str(STEP_S), "--trace-dir", str(traces))
    with running_cluster(tmp_path / "log", *flags) as cluster:
        started = threading.Barrier(4)
        threads = streams(cluster.target, 3, 60, started)
        started.wait(60)
        pid = cluster.pids()["decode-0"]
        begun = time.monotonic()
        with standing_still(pid):
            time.sleep(0.8)  # the disturbance itself
            stopped_s = time.monotonic() - begun
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
    told = said(traces)
    assert (told["requests"], told["tokens"], told["gaps"]) == (3, 180, 177)
    assert {name: count for name, count in told["left_out"].items() if count and name != "other_spans"} == {}
    assert told["causes"]["shares"]["unexplained"] < 0.02
    worst = next(gap for gap in told["worst"] if gap["token"] > 10)  # not what a busy machine's start took
    assert next(iter(worst["causes_ms"])) == "host_stall", worst
    # It may have stopped within a step, whose own time is no stall.
    assert worst["causes_ms"]["host_stall"] >= 0.9 * (stopped_s - STEP_S) * 1000, worst
    assert worst["worker"] == "decode-0"
    # Rounded one by one: they add up to the gap.
    assert sum(worst["causes_ms"].values()) == pytest.approx(worst["gap_ms"], abs=0.01)
