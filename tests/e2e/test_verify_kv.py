"""`--verify-kv` in a real cluster: blocks are checked in both transports, and one that sends no checksums is named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.cluster import running_cluster, until
from support.processes import role_process
from support.streams import assert_exact, case_of

from kvrelay.client import Client

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("transport", ["nixl", "grpc"])
async def test_checked_blocks_give_exact_answers(tmp_path: Path, transport: str) -> None:
    flags = ("--executor", "hash", "--num-blocks", "128", "--transport", transport, "--verify-kv")
    with running_cluster(tmp_path / "log", *flags) as cluster:
        await assert_exact(cluster.target, *(case_of(n, 10, seed=n) for n in (1, 15, 16, 17, 200, 600)))
        counters = cluster.worker("decode-0")["counters"]
        assert not counters.get("bad_checksum", 0)
        assert not counters.get("bad_manifest", 0)
        cluster.until_nothing_is_held()


def test_a_prefill_worker_that_sends_no_checksums_is_refused_by_name(tmp_path: Path) -> None:
    common = ("--executor", "hash", "--num-blocks", "128", "--transport", "grpc")
    with role_process(tmp_path, "coordinator", "--executor", "hash", "--listen", "127.0.0.1:0") as coordinator:
        flags = (*common, "--coordinator", coordinator.address)
        with role_process(tmp_path, "decode", *flags, "--verify-kv"), Client(coordinator.address) as client:
            until(lambda: len(client.topology()["workers"]) == 1, 20.0, "decode is up")
            command = [sys.executable, "-m", "kvrelay.cli.main", "prefill", *flags]
            refused = subprocess.run(command, capture_output=True, text=True, timeout=40, check=False)
    assert refused.returncode == 78
    assert "verify_kv differs: True here (decode worker decode-" in refused.stderr
