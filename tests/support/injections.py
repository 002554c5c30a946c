"""Faults done to real processes. Each returns a Fault with the proof that it reached this cluster, or raises NoProof.

A signal sent to a process that no one uses, a cut of a line that carries nothing, an order that nobody obeys: all of
these "work", and prove nothing about the cluster. So the proof is always what somebody else noticed.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from support.cluster import is_alive, process_state
from support.history import Fault
from support.members import View
from support.processes import RoleProcess
from support.proxy import Proxy

from kvrelay.client import Topology
from kvrelay.fault_points import ORDER, PROOF

SEEN_WITHIN_S = 5.0
SAMPLE_S = 0.05


class NoProof(AssertionError):
    """The fault may have been done, but nothing shows that it reached the cluster."""


def _wait(condition: Callable[[], bool], within_s: float) -> bool:
    ends_at = time.monotonic() + within_s
    while not condition():
        if time.monotonic() >= ends_at:
            return False
        time.sleep(0.02)  # a poll, bounded above
    return True


# processes that end


def kill(view: View, pid: int) -> Fault:
    """SIGKILL to a worker. Proof: the process is gone, and so is its incarnation from the topology."""
    worker = view.with_pid(pid)
    began = time.monotonic()
    _end(pid)
    ended = time.monotonic()
    if worker is None:
        raise NoProof(f"process {pid} ended, and was no worker of {view.target}")
    if not _wait(lambda: is_gone(view, worker["incarnation"]), SEEN_WITHIN_S):
        raise NoProof(f"{worker['id']}, process {pid}, ended and is still in the topology of {view.target}")
    proof = {"pid": pid, "incarnation": worker["incarnation"], "noticed_s": time.monotonic() - began}
    return Fault("kill", worker["id"], began, ended, proof)


def _end(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    if not _wait(lambda: not is_alive(pid), SEEN_WITHIN_S):
        raise NoProof(f"process {pid} outlives SIGKILL")


def is_gone(view: View, incarnation: str) -> bool:
    workers = view.workers()
    return bool(workers) and all(w["incarnation"] != incarnation for w in workers)


def born_again(view: View, worker_id: str, old: str, within_s: float) -> Mapping[str, Any]:
    """The topology's entry of a worker's life after the incarnation `old`. NoProof when there is none in time."""
    found: dict[str, Any] = {}

    def is_back() -> bool:
        worker = view.worker(worker_id)
        found.update(worker or {})
        return worker is not None and worker["incarnation"] != old

    if not _wait(is_back, within_s):
        raise NoProof(f"{worker_id} did not come back within {within_s} s")
    return found


def restart(view: View, process: RoleProcess, *flags: str) -> Fault:
    """SIGKILL, and the same command again. Proof: another process and incarnation under the same name and address.

    flags: given besides the old ones, such as another size of the pool.
    """
    before = view.with_pid(process.pid)
    killed_pid, address = process.pid, process.address
    began = time.monotonic()
    process.kill()
    process.start(*flags)
    if before is None:
        raise NoProof(f"process {killed_pid} was no worker of {view.target}")
    if process.address != address:
        raise NoProof(f"it came back at {process.address}, not at {address}")
    known = born_again(view, before["id"], before["incarnation"], SEEN_WITHIN_S)
    if known["pid"] != process.pid or known["address"] != before["address"]:
        raise NoProof(f"{known} is not process {process.pid} at {before['address']}")
    proof = {"pids": (killed_pid, process.pid), "incarnations": (before["incarnation"], known["incarnation"])}
    return Fault("restart", before["id"], began, time.monotonic(), proof)


def kill_coordinator(view: View, pid: int, survivors: View) -> Fault:
    """SIGKILL. Proof: its address answers no more, while another coordinator of the same workers does."""
    if not view.answers():
        raise NoProof(f"{view.target} did not answer before")
    began = time.monotonic()
    _end(pid)
    ended = time.monotonic()
    if not _wait(lambda: not view.answers(), 1.0):
        raise NoProof(f"process {pid} ended, and {view.target} answers")
    if not survivors.answers():
        raise NoProof(f"{survivors.target} answers no more either")
    return Fault("kill coordinator", view.target, began, ended, {"pid": pid})


def kill_client(view: View, pid: int, num_streams: int) -> Fault:
    """SIGKILL to a client process. Proof: so many fewer requests are open soon after."""
    before = view.open_requests()
    began = time.monotonic()
    _end(pid)
    ended = time.monotonic()
    if before < num_streams or not _wait(lambda: 0 <= view.open_requests() <= before - num_streams, SEEN_WITHIN_S):
        raise NoProof(f"process {pid} ended; {before} requests were open before, {view.open_requests()} are now")
    return Fault("kill client", str(pid), began, ended, {"open_before": before, "open_after": view.open_requests()})


# processes that stand still


def pause(pid: int, seconds: float, felt: Callable[[], str]) -> Fault:
    """SIGSTOP for so long. Proof: state T all the while, and `felt` says at least once what somebody else missed."""
    states, feelings = set(), []
    began = time.monotonic()
    os.kill(pid, signal.SIGSTOP)
    try:
        if not _wait(lambda: process_state(pid) == "T", 2.0):
            raise NoProof(f"process {pid} does not stand still")
        while time.monotonic() < began + seconds:
            states.add(process_state(pid))
            feelings.append(felt())
            time.sleep(SAMPLE_S)  # the time is what is tested
        states.add(process_state(pid))
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    ended = time.monotonic()
    if states != {"T"}:
        raise NoProof(f"process {pid} was seen in states {sorted(states)}")
    said = [f for f in feelings if f]
    if not said:
        raise NoProof(f"nobody noticed that process {pid} stood still for {seconds} s")
    return Fault("pause", str(pid), began, ended, {"samples": len(feelings), "felt": said[-1]})


def silence_of(view: View, pid: int, at_least_s: float) -> Callable[[], str]:
    """What is felt of a worker that stands still: its coordinator has not heard it for at least so long."""

    def felt() -> str:
        worker = view.with_pid(pid)
        silent = worker["silent_s"] if worker else 0.0
        return f"{worker['id']} silent for {silent:.2f} s" if worker and silent >= at_least_s else ""

    return felt


def no_answer_of(target: str) -> Callable[[], str]:
    """What is felt of a coordinator that stands still: it does not answer."""
    impatient = View(target, timeout_s=0.3)
    return lambda: "" if impatient.answers() else f"{target} does not answer"


# links


def cut(proxy: Proxy, client_pid: int | None = None) -> Fault:
    """Reset a proxy's connections now, or those of one process. Proof: there were some, and they had carried bytes."""
    began = time.monotonic()
    reset = proxy.cut(client_pid)
    if not reset.connections or not reset.forwarded:
        raise NoProof(f"{reset.connections} connections reset that had carried {reset.forwarded} bytes")
    proof = {"connections": reset.connections, "forwarded": reset.forwarded}
    return Fault("cut", proxy.address, began, time.monotonic(), proof)


@contextmanager
def slowed(proxy: Proxy, faults: list[Fault], *, delay_s: float = 0.0, bytes_per_s: float = 0.0) -> Iterator[None]:
    """Slow for the time of the block; at its end the Fault is added. Proof: bytes were kept waiting."""
    began, before = time.monotonic(), proxy.bytes_delayed
    proxy.slow(delay_s, bytes_per_s)
    try:
        yield
    finally:
        proxy.slow()
    delayed = proxy.bytes_delayed - before
    if not delayed:
        raise NoProof(f"no byte through {proxy.address} had to wait")
    faults.append(Fault("slow", proxy.address, began, time.monotonic(), {"bytes_delayed": delayed}))


# full pools


@contextmanager
def crowded(view: View, worker_id: str, need: int, faults: list[Fault]) -> Iterator[None]:
    """Watches a worker for the time of the block. Proof: requests waited while fewer than `need` blocks were free."""
    stop, waited = threading.Event(), [0]

    def watch() -> None:
        while not stop.wait(SAMPLE_S):
            waited.append(_waiting_for_blocks(view.topology(), worker_id, need))

    before = _preempted(view, worker_id)
    began, watcher = time.monotonic(), threading.Thread(target=watch, name="crowded")
    watcher.start()
    try:
        yield
    finally:
        stop.set()
        watcher.join()
    if not any(waited):
        raise NoProof(f"nobody waited while {worker_id} had fewer than {need} blocks free")
    proof = {"most_waiting": max(waited), "preempted": _preempted(view, worker_id) - before}
    faults.append(Fault("full pool", worker_id, began, time.monotonic(), proof))


def _waiting_for_blocks(topology: Topology | None, worker_id: str, need: int) -> int:
    """How many wait, at that worker and for a placement, while it has no room for one more."""
    workers = {w["id"]: w for w in topology["workers"]} if topology else {}
    if topology is None or worker_id not in workers:
        return 0
    worker = workers[worker_id]
    room = worker["blocks"]["free"] + worker["blocks"]["cached"]
    return worker["waiting"] + topology["queued_requests"] if room < need else 0


def _preempted(view: View, worker_id: str) -> int:
    return int((view.worker(worker_id) or {"counters": {}})["counters"].get("preempted", 0))


# named points in our own code


def order(directory: Path, point: str, action: str, nth: int = 1) -> dict[str, str]:
    """The variables that make a process do this at the nth passage of a named point, and write that it did."""
    return {ORDER: f"{point}:{action}:{nth}", PROOF: str(directory / f"{point}.proof")}


def obeyed(env: Mapping[str, str], pid: int, within_s: float = SEEN_WITHIN_S) -> Fault:
    """The order was carried out. Proof: that very process wrote so and, if it was to die, is gone."""
    path, (point, action, _) = Path(env[PROOF]), env[ORDER].split(":")
    line = f"{pid} {point} {action}"
    if not _wait(lambda: path.exists() and line in path.read_text().splitlines(), within_s):
        written = path.read_text() if path.exists() else ""
        raise NoProof(f"no line {line!r} in {path.name} but {written!r}")
    seen = time.monotonic()
    if action == "kill" and not _wait(lambda: not is_alive(pid), SEEN_WITHIN_S):
        raise NoProof(f"process {pid} wrote that it dies, and lives")
    return Fault(f"{action} at {point}", str(pid), path.stat().st_mtime - time.time() + seen, seen, {"line": line})
