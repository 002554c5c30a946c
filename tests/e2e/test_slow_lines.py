"""A slow line between prefill and decode, and a client that stops reading: named first, and with their size."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.cluster import running_cluster
from support.history import Fault
from support.injections import slowed
from support.members import members
from support.streams import prompt_of

from kvrelay.client import Client, GenerateResult
from kvrelay.v1 import inference_pb2, inference_pb2_grpc

pytestmark = pytest.mark.e2e
BYTES_PER_S = 50_000
SMALL_WINDOW = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
"""So that a client that does not read soon holds the coordinator's write up."""
PAUSE_S = 3.0


def worst_of(traces: Path) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "kvrelay.cli.main", "tbt", str(traces), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    worst: list[dict[str, Any]] = json.loads(done.stdout)["worst"]
    return worst


def ask(target: str, prompt: tuple[int, ...]) -> GenerateResult:
    with Client(target) as client, client.generate(prompt, max_tokens=4, ignore_eos=True, temperature=0.0) as stream:
        for _ in stream:
            pass
        return stream.result


def test_a_slow_transfer_is_the_wait_for_blocks_and_as_long_as_its_bytes_take(tmp_path: Path) -> None:
    faults: list[Fault] = []
    common = ("--transport", "grpc", "--step-tokens", "1024", "--num-blocks", "256")
    traced = ("--trace-dir", str(tmp_path / "traces"))
    with members(tmp_path, prefill=1, decode=1, common=common, proxied=["d0"], coordinator_flags=traced) as cluster:
        ask(cluster.target, prompt_of(40, 1))  # the link is there before it gets slow
        with slowed(cluster.proxies["d0"], faults, bytes_per_s=BYTES_PER_S):
            result = ask(cluster.target, prompt_of(1000, 2))
        cluster.coordinators[0].terminate()
    assert result.hand_off is not None
    transfer_ms = 1000 * result.hand_off.num_bytes / BYTES_PER_S
    worst = worst_of(tmp_path / "traces")[0]
    assert (worst["token"], next(iter(worst["causes_ms"]))) == (1, "kv_wait"), worst
    assert worst["causes_ms"]["kv_wait"] == pytest.approx(1000 * result.hand_off.exposed_s, rel=0.01), worst
    assert worst["causes_ms"]["kv_wait"] > 0.9 * transfer_ms, worst


def test_a_client_that_stops_reading_is_a_slow_reader_for_as_long_as_it_does(tmp_path: Path) -> None:
    flags = ("--executor", "hash", "--step-seconds", "0.01", "--trace-dir", str(tmp_path / "traces"))
    with running_cluster(tmp_path / "log", *flags) as cluster:
        arrived, resumed_s = read_with_a_pause(cluster.target)
    worst = worst_of(tmp_path / "traces")[0]
    stuck_ms = 1000 * (resumed_s - arrived[worst["token"]])
    assert next(iter(worst["causes_ms"])) == "slow_reader", worst
    assert worst["causes_ms"]["slow_reader"] == pytest.approx(stuck_ms, rel=0.1), worst


def read_with_a_pause(target: str) -> tuple[list[float], float]:
    """(when the coordinator had each token, when this client went on reading), in seconds since it asked."""
    request = inference_pb2.GenerateRequest(text="x", max_tokens=500, ignore_eos=True)
    arrived: list[float] = []
    resumed_s = 0.0
    with grpc.insecure_channel(target, options=SMALL_WINDOW) as channel:
        asked = time.monotonic()
        for message in inference_pb2_grpc.InferenceServiceStub(channel).Generate(request, timeout=60):
            if message.HasField("token"):
                arrived.append(message.token.offset_s)
            if len(arrived) == 20 and not resumed_s:
                time.sleep(PAUSE_S)  # the disturbance itself
                resumed_s = time.monotonic() - asked
    return arrived, resumed_s
