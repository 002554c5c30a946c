"""Real clusters, disturbed on purpose: the disturbance is the cause that their traces name first."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from support.cluster import Cluster, running_cluster, until

from kvrelay.cli.members import claim_port
from kvrelay.client import Client
from kvrelay.telemetry import names

pytestmark = pytest.mark.e2e
HASH = ("--executor", "hash", "--transport", "grpc", "--step-seconds", "0.01")
ALONE = ("--prefill", "0", "--local-prefill-below", "100000")
"""Decode computes prompts itself, in its own batch."""
TOKEN_S = 0.0001
OF_A_COORDINATOR = [value for name, value in vars(names).items() if name.startswith("PROM_")]
OF_A_WORKER = [
    *(names.PROM_BLOCKS, names.PROM_BATCH, names.PROM_WAITING, names.PROM_QUEUED_TOKENS),
    *(names.PROM_TRANSFERS, names.PROM_TOKEN_RATE, names.PROM_COUNTS),
]
LONG = 2000
"""Tokens of a prompt that takes 0.2 s, in one chunk."""


def recording(tmp_path: Path, *flags: str) -> tuple[str, ...]:
    return (*HASH, "--trace-dir", str(tmp_path / "traces"), *flags)


def causes_told(tmp_path: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "kvrelay.cli.main", "tbt", str(tmp_path / "traces"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    told: dict[str, Any] = json.loads(done.stdout)
    for gap in told["worst"]:  # rounded one by one
        assert sum(gap["causes_ms"].values()) == pytest.approx(gap["gap_ms"], abs=0.01)
    assert told["causes"]["shares"]["unexplained"] < 0.02
    return told


def waited_ms(gap: dict[str, Any]) -> float:
    """Without the token's own step, which is not known of one that prefill made, and its delivery, which a busy machine
    draws out."""
    own_ms: float = gap["step"]["ms"] if gap["step"] else 0.0
    ms: float = gap["gap_ms"] - own_ms - gap["causes_ms"].get("delivery", 0.0)
    return ms


class Stream:
    """One generation in a thread of its own; `tokens` counts up."""

    def __init__(self, cluster: Cluster, prompt: int, max_tokens: int) -> None:
        self.tokens = 0
        self._ask = (cluster.target, [prompt % 200 + 1] * prompt, max_tokens)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        target, prompt, max_tokens = self._ask
        with Client(target) as client:
            for _ in client.generate(prompt, max_tokens=max_tokens, ignore_eos=True):
                self.tokens += 1

    def has(self, tokens: int) -> None:
        until(lambda: self.tokens >= tokens, 30.0, f"{tokens} tokens, there are {self.tokens}")

    def join(self) -> None:
        self._thread.join(60)
        assert self.tokens == self._ask[2]


def test_a_long_prompt_in_the_batch_is_prefill_in_the_step_of_those_that_waited(tmp_path: Path) -> None:
    slow = ("--step-tokens", "8192", "--token-seconds", str(TOKEN_S))
    with running_cluster(tmp_path / "log", *recording(tmp_path, *ALONE, *slow)) as cluster:
        streams = [Stream(cluster, 20 + number, 120) for number in range(3)]
        for stream in streams:
            stream.has(40)
        Stream(cluster, LONG, 2).join()
        for stream in streams:
            stream.join()
    told = causes_told(tmp_path)
    worst = next(gap for gap in told["worst"] if gap["token"] > 10)  # not what a busy machine's start took
    assert next(iter(worst["causes_ms"])) == "prefill_in_step", worst
    share = worst["causes_ms"]["prefill_in_step"] / (1000 * TOKEN_S * LONG)
    assert 0.9 < share < 1.5, worst  # more of it on a busy machine


def test_a_sequence_that_had_to_make_room_was_preempted(tmp_path: Path) -> None:
    small = ("--num-blocks", "16", "--preempt", "recompute", "--no-prefix-cache")
    with running_cluster(tmp_path / "log", *recording(tmp_path, *ALONE, *small)) as cluster:
        first = Stream(cluster, 16, 200)
        first.has(5)
        second = Stream(cluster, 16, 120)
        first.join()
        second.join()
    worst = causes_told(tmp_path)["worst"][0]
    assert next(iter(worst["causes_ms"])) == "swap_or_preemption", worst
    assert worst["causes_ms"]["swap_or_preemption"] > 0.9 * waited_ms(worst), worst


def test_a_killed_worker_is_a_migration_of_the_streams_it_had(tmp_path: Path) -> None:
    with running_cluster(tmp_path / "log", *recording(tmp_path, "--decode", "2")) as cluster:
        streams = [Stream(cluster, 20 + number, 80) for number in range(4)]
        for stream in streams:
            stream.has(15)
        os.kill(cluster.pids()["decode-0"], signal.SIGKILL)
        for stream in streams:
            stream.join()
    told = causes_told(tmp_path)
    moved = [gap for gap in told["worst"] if gap["causes_ms"].get("migration")]
    assert moved, told["worst"]
    for gap in moved:
        assert next(iter(gap["causes_ms"])) == "migration", gap
        assert gap["causes_ms"]["migration"] > 0.9 * waited_ms(gap), gap


def metrics_of(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        lines = [line for line in answer.read().decode().splitlines() if not line.startswith("#")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


def test_metrics_of_every_process_add_up(tmp_path: Path) -> None:
    port = claim_port("127.0.0.1:0")[1]
    with running_cluster(tmp_path / "log", *HASH, "--metrics", f"127.0.0.1:{port}") as cluster:
        for stream in [Stream(cluster, 20 + number, 30) for number in range(3)]:
            stream.join()

        def told() -> bool:
            now = metrics_of(port)
            return now["kvrelay_requests_open"] == 0 and any("clock_error" in name for name in now)  # after a heartbeat

        until(told, 5.0, "all requests ended")
        told_by_all = metrics_of(port)
        workers = [metrics_of(port + number) for number in (1, 2)]
    assert [name for name in OF_A_COORDINATOR if not any(s.startswith(name) for s in told_by_all)] == []
    for told_by_one in workers:
        assert [name for name in OF_A_WORKER if not any(s.startswith(name) for s in told_by_one)] == []
    assert told_by_all["kvrelay_requests_started_total"] == 3
    assert told_by_all['kvrelay_requests_total{outcome="length"}'] == 3
    assert told_by_all["kvrelay_gap_seconds_count"] == 3 * 29
    causes = [value for name, value in told_by_all.items() if name.startswith("kvrelay_gap_cause_seconds_total")]
    assert len(causes) == 12
    assert sum(causes) == pytest.approx(told_by_all["kvrelay_gap_seconds_sum"], abs=1e-6)
    assert told_by_all['kvrelay_gap_cause_seconds_total{cause="unexplained"}'] < 0.02 * sum(causes)
    assert workers[1]['kvrelay_worker_blocks{role="decode",state="held",worker="decode-0"}'] >= 0
