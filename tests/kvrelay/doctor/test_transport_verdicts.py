"""What the doctor says of moving blocks, and how it reads the path that UCX took."""

from __future__ import annotations

from kvrelay.doctor.finding import Verdict
from kvrelay.doctor.transport import Moved, judge_transport, ucx_path

OK, WARNING, PROBLEM = Verdict


def account(config: str, peer: str = "intra-node") -> list[str]:
    """UCX's account of one process, as it writes it: of itself, then of its peer."""
    lines = []
    for whom, what, path in (
        ("self cfg#0", "remote memory write by ucp_put* from host memory to host", "sysv/memory"),
        (f"{peer} cfg#1", "active message by ucp_am_send* from host memory", "tcp/lo"),
        (f"{peer} cfg#1", "remote memory write by ucp_put*(multi) from host memory to host", config),
        (f"{peer} cfg#1", "active message by ucp_am_send*(egr) from host memory", "tcp/lo"),
    ):
        lines += [
            f"[17.5] [vm:9641 :0]   | probe-writer {whom}          |",
            f"[17.5] [vm:9641 :0]   | {what} |",
            "[17.5] [vm:9641 :0]   +--------+-------------+------------+",
            "[17.5] [vm:9641 :0]   | Range  | Description |   Config   |",
            f"[17.5] [vm:9641 :0]   | 0..inf | zero-copy   | {path} |",
        ]
    return lines


def test_the_path_of_writes_to_the_other_process_is_read() -> None:
    assert ucx_path(account("cma/memory")) == "memory to memory (cma)"
    assert ucx_path(account("52% on tcp/lo and 48% on tcp/eth0")) == "TCP"
    assert ucx_path(account("rc_mlx5/mlx5_0:1/path0", "inter-node")) == "InfiniBand (rc)"
    assert ucx_path(account("cuda_ipc/cuda")) == "GPU to GPU (cuda_ipc)"


def test_a_path_unknown_to_us_is_told_as_ucx_does_and_none_as_none() -> None:
    assert ucx_path(account("new/thing")) == "new/thing"
    assert ucx_path(account("x/y")[:5]) == ""
    assert ucx_path([]) == ""


def test_what_works_is_told_with_its_rate_and_path() -> None:
    finding = judge_transport(Moved("nixl", 5.25, 0.0002, "memory to memory (cma)"), "nixl")
    what = "5.25 GB/s between two processes, 0.20 ms for one block, by memory to memory (cma)"
    assert (finding.verdict, finding.what, finding.advice) == (OK, what, "")
    assert finding.figures == {"gb_per_s": 5.25, "one_block_s": 0.0002, "path": "memory to memory (cma)"}


def test_tcp_between_processes_of_one_host_is_warned_of_for_nixl_only() -> None:
    assert judge_transport(Moved("nixl", 2.0, 0.001, "TCP"), "nixl").verdict is WARNING
    assert judge_transport(Moved("grpc", 0.4, 0.001, "HTTP/2 over TCP"), "nixl").verdict is OK


def test_a_slow_transport_is_warned_of_by_its_own_measure() -> None:
    assert judge_transport(Moved("nixl", 0.4, 0.001, "memory to memory (cma)"), "nixl").verdict is WARNING
    assert judge_transport(Moved("grpc", 0.04, 0.001), "grpc").verdict is WARNING


def test_a_broken_transport_is_a_problem_if_workers_are_configured_with_it() -> None:
    broken = Moved("nixl", error="ModuleNotFoundError: No module named 'nixl_cu12'")
    needed = judge_transport(broken, "nixl")
    assert needed.verdict is PROBLEM
    assert needed.what == "does not move blocks: ModuleNotFoundError: No module named 'nixl_cu12'"
    assert needed.advice == "--transport grpc on all workers until it works"
    assert judge_transport(broken, "grpc").verdict is WARNING


def test_one_that_had_no_time_to_end_is_no_problem_yet() -> None:
    late = judge_transport(Moved("nixl", error="no result within 5 s", unknown=True), "nixl")
    assert (late.verdict, late.what) == (WARNING, "not measured: no result within 5 s")
