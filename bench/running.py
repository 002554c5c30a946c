"""A `kvrelay up` for measuring: starts and ends it, and reads its processes in /proc. Knows no load and no figures."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrelay.cli import bench_stats
from kvrelay.client import Client

STOP_S = 20.0
LEAK_S = 5.0
"""How soon after the last call everything must be free again."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What one process holds: resident memory, descriptors, threads, mappings of shared memory."""

    rss_mib: float
    descriptors: int
    threads: int
    shared_maps: int


@dataclass(frozen=True, slots=True)
class Running:
    """target: where clients reach it. pids: process id by name, `coordinator` and each worker's id.

    http: URL of the OpenAI door, "" without one.
    """

    target: str
    pids: Mapping[str, int]
    http: str = ""

    def usage(self) -> dict[str, Usage]:
        return {name: usage_of(pid) for name, pid in self.pids.items()}

    def cpu_s(self) -> dict[str, float]:
        """Processor time each has used so far."""
        return {name: cpu_s_of(pid) for name, pid in self.pids.items()}

    def rss_mib(self) -> dict[str, float]:
        return {name: _rss_mib(Path(f"/proc/{pid}")) for name, pid in self.pids.items()}


@contextmanager
def running(flags: Sequence[str], env: Mapping[str, str], log: Path) -> Iterator[Running]:
    """Start a cluster and wait for its ready line. SystemExit, with the end of its log, when it does not come."""
    command = [sys.executable, "-m", "kvrelay.cli.main", "up", "--listen", "127.0.0.1:0", *flags]
    with log.open("w") as stderr:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=stderr, text=True, env={**os.environ, **env}, start_new_session=True
        )
    try:
        assert process.stdout is not None
        words = process.stdout.readline().split()
        if words[:1] != ["ready"]:
            raise SystemExit(f"the cluster did not start:\n{log.read_text()[-3000:]}")
        yield Running(words[1], _members(process.pid, words[1]), *words[2:])
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def running_roles(flags: Mapping[str, Sequence[str]], directory: Path) -> Iterator[Running]:
    """A cluster of one process a role, each with flags of its own; no supervisor starts anything again."""
    processes: dict[str, subprocess.Popen[str]] = {}
    try:
        target = _start(processes, "coordinator", ["--listen", "127.0.0.1:0", *flags["coordinator"]], directory)
        for role in ("prefill", "decode"):
            _start(processes, role, ["--coordinator", target, "--worker-id", role, *flags[role]], directory)
        _until_ready(target, len(processes) - 1)
        yield Running(target, {role: process.pid for role, process in processes.items()})
    finally:
        for process in reversed(processes.values()):
            process.send_signal(signal.SIGCONT)
            process.send_signal(signal.SIGTERM)
        for process in processes.values():
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _start(processes: dict[str, subprocess.Popen[str]], role: str, flags: Sequence[str], directory: Path) -> str:
    """Where it serves."""
    log = directory / f"{role}.log"
    command = [sys.executable, "-m", "kvrelay.cli.main", role, *flags]
    with log.open("w") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
    processes[role] = process
    assert process.stdout is not None
    words = process.stdout.readline().split()
    if words[:1] != ["ready"]:
        raise SystemExit(f"{role} did not start:\n{log.read_text()[-3000:]}")
    return words[1]


def _until_ready(target: str, num_workers: int, within_s: float = 30.0) -> None:
    ends_at = time.monotonic() + within_s
    with Client(target) as client:
        while len(client.topology()["workers"]) < num_workers:
            if time.monotonic() > ends_at:
                raise SystemExit("the workers did not register")
            time.sleep(0.1)


def _members(supervisor: int, target: str) -> dict[str, int]:
    """Workers by their own word; the coordinator is the supervisor's other child."""
    with Client(target) as client:
        workers = {w["id"]: w["pid"] for w in client.topology()["workers"]}
    children = {
        int(pid) for task in Path(f"/proc/{supervisor}/task").iterdir() for pid in _words(task / "children")
    } - set(workers.values())
    (coordinator,) = [pid for pid in children if b"coordinator" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return {"coordinator": coordinator, **workers}


def usage_of(pid: int) -> Usage:
    at = Path(f"/proc/{pid}")
    shared = sum("/dev/shm/" in line or "/memfd:" in line for line in (at / "maps").read_text().splitlines())
    threads = int(_field(at / "status", "Threads"))
    return Usage(_rss_mib(at), len(list((at / "fd").iterdir())), threads, shared)


def cpu_s_of(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def state_of(pid: int) -> str:
    """R, S, T (stopped), ... as in /proc."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def shared_memory() -> set[str]:
    """Names in /dev/shm; empty where there is none."""
    at = Path("/dev/shm")
    return {entry.name for entry in at.iterdir()} if at.is_dir() else set()


def is_quiet(topology: Mapping[str, Any]) -> bool:
    """Nothing is open, runs, waits or is on its way, and every block is free or cached."""
    return topology["open_requests"] == topology["queued_requests"] == 0 and all(
        w["blocks"]["free"] + w["blocks"]["cached"] == w["blocks"]["total"]
        and w["running"] == w["waiting"] == w["transfers_in_flight"] == 0
        for w in topology["workers"]
    )


def until_quiet(target: str, within_s: float = LEAK_S) -> tuple[bool, dict[str, Any]]:
    """(whether everything was given back in time, the last topology)."""
    ends_at = time.monotonic() + within_s
    with Client(target) as client:
        while True:
            topology = dict(client.topology())
            if is_quiet(topology) or time.monotonic() > ends_at:
                return is_quiet(topology), topology
            time.sleep(0.05)


def percentile(values: Sequence[float], share: float) -> float:
    """As `kvrelay bench` counts it; nan of nothing."""
    return bench_stats.percentile(values, 100.0 * share) if values else float("nan")


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:  # a thread that has just ended
        return []


def _field(path: Path, name: str) -> str:
    line = next(line for line in path.read_text().splitlines() if line.startswith(f"{name}:"))
    return line.split()[1]


def _rss_mib(at: Path) -> float:
    return int((at / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
