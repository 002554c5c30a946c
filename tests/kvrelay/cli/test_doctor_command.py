"""`kvrelay doctor`: the real command, and what it measures and asks, each by itself."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvrelay.cli.app import app
from kvrelay.cli.doctor_cluster import ask_cluster, serves
from kvrelay.cli.doctor_host import (
    default_configs,
    load_configs,
    measure_bandwidth,
    need_of,
    read_cpus,
    read_memory,
)
from kvrelay.cli.doctor_probes import Probe, ProbeFailed, probe_transport
from kvrelay.doctor.host import Need
from kvrelay.rpc.server import RpcServer
from kvrelay.v1 import admin_pb2, admin_pb2_grpc, common_pb2

CHECKS = ["python", "config", "model", "cpu", "threads", "memory", "/dev/shm", "files"]
MEASURED = ["kernels", "gpu", "bandwidth", "nixl", "grpc"]


def doctor(*arguments: str, **variables: str) -> tuple[int, dict[str, dict[str, object]], str]:
    """(exit code, findings by check, verdict) of a process of its own, without any KVRELAY_* but those given."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("KVRELAY_")} | variables
    argv = [sys.executable, "-m", "kvrelay.cli.main", "doctor", "--json", *arguments]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=100, check=False, env=env)
    answer = json.loads(done.stdout)
    return done.returncode, {finding["check"]: finding for finding in answer["findings"]}, answer["verdict"]


def test_the_command_looks_at_everything_and_names_what_is_wrong(tmp_path: Path) -> None:
    config = tmp_path / "k.toml"
    config.write_text("[worker]\nthread = 2\n")
    code, findings, verdict = doctor("--config", str(config), KVRELAY_CACHE=str(tmp_path))
    assert (code, verdict) == (1, "problem")
    assert list(findings) == [*CHECKS, "port", *MEASURED]
    assert findings["config"]["what"] == "worker.thread is not a known setting; did you mean threads?"
    assert findings["config"]["figures"]["field"] == "worker.thread"
    assert findings["model"]["verdict"] == "problem"
    assert "kvrelay models pull smollm2-135m-instruct" in findings["model"]["what"]
    assert findings["python"]["verdict"] == "ok"
    assert findings["bandwidth"]["figures"]["all_cores_bytes_per_s"] > 0


def test_a_target_that_nobody_serves_is_a_problem(closed_port: int) -> None:
    answer = ask_cluster(f"127.0.0.1:{closed_port}", timeout_s=2.0)
    assert answer.workers == ()
    assert "refused" in answer.error.lower()
    assert not serves(f"127.0.0.1:{closed_port}", timeout_s=2.0)


def test_a_target_without_a_port_is_wrong_usage() -> None:
    done = CliRunner().invoke(app, ["doctor", "--target", "nowhere"])
    assert done.exit_code == 2
    assert "must be HOST:PORT" in done.stderr


class Admin(admin_pb2_grpc.AdminServiceServicer):
    """One decode worker, which answers at the coordinator's own address."""

    address = ""

    async def GetTopology(self, request, context):
        layout = common_pb2.KVLayout(kv_heads=3, layers=30, block_size=16, head_dim=64, dtype="bfloat16")
        about = common_pb2.WorkerDescription(
            worker_id="d1",
            role=common_pb2.ROLE_DECODE,
            address=self.address,
            model=common_pb2.ModelIdentity(model_id="m", fingerprint="0123456789"),
            layouts=[layout],
            transport="nixl",
            executor="torch",
            protocol_version=3,
            verify_kv=True,
        )
        load = common_pb2.Load(blocks=common_pb2.BlockCounts(total=8, quarantined=2), draining=True)
        status = admin_pb2.WorkerStatus(description=about, load=load, silent_s=0.5)
        status.clock.CopyFrom(admin_pb2.Clock(offset_s=-3.0, error_s=0.001))
        return admin_pb2.GetTopologyResponse(workers=[status])


@pytest.fixture
def coordinator() -> Iterator[str]:
    loop, admin = asyncio.new_event_loop(), Admin()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> RpcServer:
        server = RpcServer()
        server.add(admin_pb2_grpc.add_AdminServiceServicer_to_server, admin, "kvrelay.v1.AdminService")
        admin.address = f"127.0.0.1:{server.bind('127.0.0.1:0')}"
        await server.start()
        return server

    server = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    yield admin.address
    asyncio.run_coroutine_threadsafe(server.stop(0.1), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()


@pytest.fixture
def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def test_a_cluster_is_asked_for_its_workers_and_each_of_them_for_its_health(coordinator: str) -> None:
    answer = ask_cluster(coordinator, timeout_s=10.0)
    (worker,) = answer.workers
    assert (answer.error, len(answer.round_trips_s)) == ("", 5)
    assert (worker.worker_id, worker.role, worker.address) == ("d1", "decode", coordinator)
    assert (worker.model, worker.protocol_version) == ("m (01234567)", "3")
    assert worker.layout == "30 layers x 3 heads of 64, bfloat16, blocks of 16"
    assert (worker.prefix_cache, worker.verify_kv, worker.draining) == (False, True, True)
    assert (worker.silent_s, worker.quarantined, worker.health) == (0.5, 2, "SERVING")
    assert (worker.clock_offset_s, worker.clock_error_s) == (-3.0, 0.001)
    assert worker.round_trip_s is not None
    assert worker.round_trip_s > 0
    assert serves(coordinator, timeout_s=10.0)


def test_nixl_moves_blocks_between_two_processes_and_tells_its_path() -> None:
    moved = probe_transport("nixl", timeout_s=60.0)
    assert (moved.error, moved.unknown) == ("", False)
    assert moved.gb_per_s > 0
    assert moved.one_block_s > 0
    assert moved.path


def test_grpc_moves_blocks_between_two_processes() -> None:
    moved = probe_transport("grpc", timeout_s=60.0)
    assert (moved.error, moved.path) == ("", "HTTP/2 over TCP")
    assert moved.gb_per_s > 0


def test_a_probe_that_fails_says_its_last_words() -> None:
    with pytest.raises(ProbeFailed, match="No module named") as failed:
        Probe("kvrelay.no_such_module").result(30.0)
    assert not failed.value.unknown


def test_a_probe_that_hangs_is_ended_with_all_that_it_started() -> None:
    probe = Probe("kvrelay.cli.main", "health", "--help")
    with pytest.raises(ProbeFailed, match="no result within 0 s") as late:
        probe.result(0.0)
    assert late.value.unknown
    with pytest.raises(ProcessLookupError):
        os.killpg(probe._process.pid, 0)


def test_the_host_is_read_within_what_is_possible() -> None:
    cpus, memory = read_cpus(), read_memory()
    assert cpus.num_cpus == len(os.sched_getaffinity(0))
    assert 0 < cpus.usable <= cpus.num_cpus
    assert memory.available > 0
    assert memory.max_files > 0
    assert measure_bandwidth(2) > 1e6


def test_what_workers_need_is_counted_over_all_of_them(tmp_path: Path) -> None:
    mib = 2**20
    assert need_of(default_configs(), 0, 0) == Need(2, 2, 2 * (300 * 10**6 + 512 * mib) + 256 * mib)
    config = tmp_path / "k.toml"
    config.write_text("[up]\ndecode = 3\n[worker]\nnum_blocks = 100\nthreads = 2\nswap_mb = 0\n[decode]\nthreads = 4\n")
    need = need_of(load_configs(str(config), {}), weight_bytes=10**9, token_bytes=1000)
    assert need == Need(4, 2 + 3 * 4, 4 * (300 * 10**6 + 10**9 + 100 * 16 * 1000))
