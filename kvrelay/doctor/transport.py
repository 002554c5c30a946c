"""Verdicts on moving blocks between two processes: does it work, how fast, and over which path. Pure.

UCX, under NIXL, says at its start which path it takes; `ucx_path` reads that.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from kvrelay.doctor.finding import Finding, Verdict

SLOW_GB_PER_S = {"nixl": 0.5, "grpc": 0.05}
PATHS = (
    ("cuda_ipc", "GPU to GPU (cuda_ipc)"),
    ("rc", "InfiniBand (rc)"),
    ("dc", "InfiniBand (dc)"),
    ("ud", "InfiniBand (ud)"),
    ("cma", "memory to memory (cma)"),
    ("xpmem", "memory to memory (xpmem)"),
    ("knem", "memory to memory (knem)"),
    ("sysv", "shared memory (sysv)"),
    ("posix", "shared memory (posix)"),
    ("tcp", "TCP"),
)
"""UCX's names for transports and ours, fastest first."""
_TITLE = re.compile(r"\|\s*\S.*\s(?:intra-node|inter-node) cfg#\d+")
_WRITES = re.compile(r"remote memory write by ucp_put")
_ROW = re.compile(r"\|\s*[\d.]+\.\.(?:inf|[\d.]+\w?)\s*\|[^|]*\|([^|]*)\|")


@dataclass(frozen=True, slots=True)
class Moved:
    """What a probe found, the best of a few rounds. error: why it did not work, "" if it did. one_block_s: from post
    to landed.

    unknown: it had no time to end, which on a busy machine says nothing.
    """

    transport: str
    gb_per_s: float = 0.0
    one_block_s: float = 0.0
    path: str = ""
    error: str = ""
    unknown: bool = False


def ucx_path(lines: Iterable[str]) -> str:
    """The path of writes to another process, of UCX's own account (UCX_PROTO_INFO=y), in our words; "" if not told."""
    told, others, writes = "", False, False
    for line in lines:
        if "cfg#" in line:
            others, writes = bool(_TITLE.search(line)), False
        elif "remote memory" in line or "active message" in line:
            writes = bool(_WRITES.search(line))
        elif others and writes and (row := _ROW.search(line)):
            told = row.group(1).strip()
    return _in_words(told)


def _in_words(told: str) -> str:
    """ "52% on tcp/lo and 48% on tcp/eth0" -> "TCP"; "cma/memory" -> "memory to memory (cma)"."""
    used = {name.split("_")[0] if name.startswith(("rc", "dc", "ud")) else name for name in re.findall(r"(\w+)/", told)}
    found = [words for name, words in PATHS if name in used]
    return " and ".join(found) or told


def judge_transport(moved: Moved, configured: str) -> Finding:
    """A transport that does not work is a problem if workers are configured with it, else a warning."""
    figures = {"gb_per_s": moved.gb_per_s, "one_block_s": moved.one_block_s, "path": moved.path}
    if moved.unknown:
        advice = "try again when nothing else runs; if it stays so, the transport hangs"
        return Finding(moved.transport, Verdict.WARNING, f"not measured: {moved.error}", advice, figures)
    if moved.error:
        needed = moved.transport == configured
        other = "grpc" if moved.transport == "nixl" else "nixl"
        advice = f"--transport {other} on all workers until it works" if needed else ""
        verdict = Verdict.PROBLEM if needed else Verdict.WARNING
        return Finding(moved.transport, verdict, f"does not move blocks: {moved.error}", advice, figures)
    what = f"{moved.gb_per_s:.2f} GB/s between two processes, {moved.one_block_s * 1e3:.2f} ms for one block"
    what += f", by {moved.path}" if moved.path else ""
    if moved.gb_per_s < SLOW_GB_PER_S[moved.transport]:
        advice = "look for what else runs here; between hosts look at the network"
        return Finding(moved.transport, Verdict.WARNING, f"{what}: slow", advice, figures)
    if moved.transport == "nixl" and moved.path == "TCP":
        advice = (
            "let processes read each other's memory (containers: shared ipc and pid, cap_add SYS_PTRACE; unset UCX_TLS)"
        )
        return Finding(moved.transport, Verdict.WARNING, f"{what}, though on one host", advice, figures)
    return Finding(moved.transport, Verdict.OK, what, figures=figures)
