"""A cluster's topology as a table for people. Knows no client."""

from __future__ import annotations

from rich.table import Table

from kvrelay.client import Topology, WorkerStatus

LEFT = ("worker", "role", "incarnation")
RIGHT = ("pid", "run", "wait", "moving", "tok/s", "free", "held", "cached", "reserved", "quarantined")
COUNTERS = "counted so far"


def topology_table(topology: Topology) -> Table:
    """One row a worker; those that drain or fell silent stand out."""
    requests = f"{topology['open_requests']} requests, {topology['queued_requests']} of them queued"
    if moved := topology["counters"].get("migrated", 0):
        requests += f"; {moved} moved to other workers so far"
    table = Table(
        title=f"coordinator {topology['coordinator_id']}: {requests}", title_justify="left", box=None, pad_edge=False
    )
    for name in LEFT:
        table.add_column(name)
    for name in RIGHT:
        table.add_column(name, justify="right")
    table.add_column(COUNTERS, overflow="fold")
    for worker in topology["workers"]:
        style = "yellow" if worker["draining"] or worker["silent_s"] > 1.5 else None
        table.add_row(*_cells(worker), style=style)
    return table


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
    return ", ".join(["drains"] * worker["draining"] + found)
