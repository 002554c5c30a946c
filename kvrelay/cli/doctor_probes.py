"""Probes of `doctor` that run as processes of their own, so that none can hang or crash it. Judges nothing."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvrelay.doctor.host import Kernels
from kvrelay.doctor.transport import Moved, ucx_path

MODULES = {"nixl": "kvtransfer.probe", "grpc": "worker.link_probe"}
KILL_WAIT_S = 2.0


class ProbeFailed(Exception):
    """The message says why. unknown: there was no time to end."""

    def __init__(self, message: str, unknown: bool = False) -> None:
        super().__init__(message)
        self.unknown = unknown


class Probe:
    """A module that prints one JSON object, started at once, in a session of its own: all of it can be ended."""

    def __init__(self, module: str, *arguments: str, env: Mapping[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=dict(os.environ) | dict(env or {}),
            start_new_session=True,
        )

    def result(self, timeout_s: float) -> dict[str, Any]:
        """Its object. ProbeFailed if it ends in any other way, or not in time; nothing of it runs on."""
        try:
            out, err = self._process.communicate(timeout=max(0.0, timeout_s))
        except subprocess.TimeoutExpired:
            raise ProbeFailed(f"no result within {timeout_s:.0f} s", unknown=True) from None
        finally:
            self.end()
        lines = out.strip().splitlines()
        if self._process.returncode or not lines:
            said = err.strip().splitlines() or [f"it ended with {self._process.returncode}"]
            raise ProbeFailed(said[-1])
        found: dict[str, Any] = json.loads(lines[-1])
        return found

    def end(self) -> None:
        """Kill what is left of its session. Twice is once."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired, ValueError):
            self._process.communicate(timeout=KILL_WAIT_S)


def kernels_of(probe: Probe, timeout_s: float) -> Kernels:
    """What a probe of `doctor_kernels` found."""
    device = Path("/dev/nvidia0").exists()
    try:
        found = probe.result(timeout_s)
    except ProbeFailed as failure:
        return Kernels("", str(failure), "", "", "", (), device, failure.unknown)
    gpus = tuple(found["gpus"])
    return Kernels(found["torch"], "", found["native"], found["detail"], found["linear"], gpus, device)


def probe_transport(name: str, timeout_s: float) -> Moved:
    """Move blocks between two processes on this host. UCX writes of its paths into a folder of ours."""
    with tempfile.TemporaryDirectory(prefix="kvrelay-doctor-") as folder:
        logs = {"UCX_PROTO_INFO": "y", "UCX_LOG_LEVEL": "info", "UCX_LOG_FILE": f"{folder}/ucx-%p.log"}
        try:
            found = Probe(MODULES[name], env=logs if name == "nixl" else {}).result(timeout_s)
        except ProbeFailed as failure:
            return Moved(name, error=str(failure), unknown=failure.unknown)
        one, many = found["rows"][0], found["rows"][-1]
        path = _path(Path(folder)) if name == "nixl" else "HTTP/2 over TCP"
        rate = many["blocks"] * found["block_bytes"] / many["best_s"]
        return Moved(name, rate / 1e9, one["best_s"], path)


def _path(folder: Path) -> str:
    """What either of the two processes says of writes to the other."""
    for log in sorted(folder.glob("ucx-*.log")):
        with log.open(errors="replace") as lines:
            if path := ucx_path(lines):
                return path
    return ""
