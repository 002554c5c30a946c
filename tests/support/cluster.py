"""A real cluster for tests: `kvrelay up` as a subprocess, its workers by pid, and conditions to wait for."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kvrelay.client import Client

READY_TIMEOUT_S = 90.0
STOP_TIMEOUT_S = 20.0
COMPLAINTS = (
    "BlockingIOError",
    "was destroyed but it is pending",
    "was never awaited",
    "was never retrieved",
    "Exception in callback",
    "Exception ignored in",
)
"""What an event loop that is misused says, also on the way out."""


class Cluster:
    """target is the coordinator's address. Workers are looked up by id in the topology, never by name of process.

    http: URL of the OpenAI door; empty without one.
    """

    def __init__(self, process: subprocess.Popen[str], target: str, log: Path, http: str = "") -> None:
        self.process = process
        self.target = target
        self.http = http
        self.log = log

    def topology(self) -> list[dict[str, Any]]:
        with Client(self.target) as client:
            return [dict(w) for w in client.topology()["workers"]]

    def worker(self, worker_id: str) -> dict[str, Any]:
        return next(w for w in self.topology() if w["id"] == worker_id)

    def pids(self) -> dict[str, int]:
        return {w["id"]: w["pid"] for w in self.topology()}

    def until(self, what: str, condition: Callable[[list[dict[str, Any]]], bool], within_s: float = 10.0) -> None:
        """Wait until the topology satisfies a condition; fails with the last topology and the end of the log."""
        ends_at = time.monotonic() + within_s
        while True:
            workers = self.topology()
            if condition(workers):
                return
            assert time.monotonic() < ends_at, f"not within {within_s} s: {what}: {workers}\n{self.log_tail()}"
            time.sleep(0.05)  # a poll, bounded above

    def until_nothing_is_held(self, within_s: float = 6.0) -> None:
        """Every block of every worker is free or cached again, and nothing runs, waits or is on its way."""

        def quiet(workers: list[dict[str, Any]]) -> bool:
            return all(
                w["blocks"]["free"] + w["blocks"]["cached"] == w["blocks"]["total"]
                and w["running"] == w["waiting"] == w["transfers_in_flight"] == 0
                for w in workers
            )

        self.until("all blocks back", quiet, within_s)

    def log_tail(self) -> str:
        return "\n".join(self.log.read_text().splitlines()[-30:])

    def stop(self) -> int:
        """SIGTERM and wait; SIGKILL if that does not end it."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait(5)


def start_cluster(log: Path, *flags: str) -> Cluster:
    """Start `kvrelay up` on a free port and wait for its ready line; fails with the log when it does not come."""
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "kvrelay.cli.main", "up", "--listen", "127.0.0.1:0", *flags],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**os.environ, "OMP_WAIT_POLICY": "passive"},
        )
    try:
        assert process.stdout is not None
        readable, _, _ = select.select([process.stdout], [], [], READY_TIMEOUT_S)
        line = process.stdout.readline() if readable else ""
        assert line.startswith("ready "), f"no ready line, got {line!r}\n{log.read_text()[-3000:]}"
    except BaseException:
        process.kill()
        process.wait(5)
        raise
    _, target, *http = line.split()
    return Cluster(process, target, log, *http)


@contextmanager
def running_cluster(log: Path, *flags: str) -> Iterator[Cluster]:
    """Whatever happened in it, nothing of it may have misused its event loop."""
    cluster = start_cluster(log, *flags)
    try:
        yield cluster
    finally:
        cluster.stop()
    assert complaints_in(log.read_text()) == []


def complaints_in(text: str) -> list[str]:
    """Lines of a log that no process of ours may write."""
    return [line for line in text.splitlines() if any(words in line for words in COMPLAINTS)]


def is_alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return process_state(pid) != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def until(condition: Callable[[], bool], within_s: float, what: str) -> None:
    ends_at = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < ends_at, f"not within {within_s} s: {what}"
        time.sleep(0.02)  # a poll, bounded above


@contextmanager
def standing_still(pid: int) -> Iterator[None]:
    """SIGSTOP for the time of the block; the process is seen to be stopped, not just told to."""
    os.kill(pid, signal.SIGSTOP)
    try:
        until(lambda: process_state(pid) == "T", 2.0, f"process {pid} stands still")
        yield
    finally:
        with suppress(ProcessLookupError):  # killed meanwhile
            os.kill(pid, signal.SIGCONT)


def process_state(pid: int) -> str:
    """The letter of /proc: T stands still, Z is dead and not yet waited for."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
