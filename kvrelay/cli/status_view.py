"""A cluster's topology as a table for people. Knows no client."""

from __future__ import annotations

from rich.table import Table

from kvrelay.client import Topology, WorkerStatus

LEFT = ("worker", "role", "incarnation")
RIGHT = ("pid", "run", "wait", "moving", "tok/s", "free", "held", "cached", "reserved", "quarantined")
COUNTERS = "counted so far"
NARROW = 120
"""Columns of a terminal below which a table is without NOT_IN_NARROW, and what was counted stands below it."""
NOT_IN_NARROW = ("role", "incarnation", "pid")


def topology_table(topology: Topology, width: int) -> Table:
    """One row a worker; those that drain, are unwell or silent stand out. width: of the terminal, in characters."""
    narrow = width < NARROW
    requests = f"{topology['open_requests']} requests, {topology['queued_requests']} of them queued"
    if moved := topology["counters"].get("migrated", 0):
        again = topology["counters"].get("recomputed_tokens", 0)
        requests += f"; {moved} moved to other workers so far, {again} tokens computed anew for it"
    table = Table(
        title=f"coordinator {topology['coordinator_id']}: {requests}",
        title_justify="left",
        caption=_counted_by_worker(topology) if narrow else None,
        caption_justify="left",
        box=None,
        pad_edge=False,
        padding=(0, 1) if narrow else (0, 2, 0, 0),
        collapse_padding=True,
    )
    shown = [name for name in (*LEFT, *RIGHT, COUNTERS) if not narrow or name not in (*NOT_IN_NARROW, COUNTERS)]
    for name in shown:
        table.add_column(name, justify="right" if name in RIGHT else "left", overflow="fold")
    for worker in topology["workers"]:
        style = "red" if worker["unwell"] else "yellow" if worker["draining"] or worker["silent_s"] > 1.5 else None
        cells = dict(zip((*LEFT, *RIGHT, COUNTERS), _cells(worker), strict=True))
        table.add_row(*(cells[name] for name in shown), style=style)
    return table


def _counted_by_worker(topology: Topology) -> str | None:
    """A line for each worker of which something was counted."""
    told = [(worker["id"], counted(worker)) for worker in topology["workers"]]
    return "\n".join(f"{name}: {found}" for name, found in told if found) or None


def _cells(worker: WorkerStatus) -> tuple[str, ...]:
    blocks = worker["blocks"]
    return (
        worker["id"],
        worker["role"],
        worker["incarnation"][:6],
        str(worker["pid"]),
        str(worker["running"]),
        str(worker["waiting"]),
        str(worker["transfers_in_flight"]),
        f"{worker['tokens_per_s']:.0f}",
        f"{blocks['free']}/{blocks['total']}",
        str(blocks["held"]),
        str(blocks["cached"]),
        str(blocks["reserved"]),
        str(blocks["quarantined"]),
        counted(worker),
    )


def counted(worker: WorkerStatus) -> str:
    """What happened since the worker's start, of what a quiet cluster has none of: "forced 1, lease_expired 2"."""
    found = [f"{name} {times}" for name, times in sorted(worker["counters"].items()) if times]
    return ", ".join(["unwell"] * worker["unwell"] + ["drains"] * worker["draining"] + found)
