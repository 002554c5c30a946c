"""Who waits for whose blocks: a snapshot of the cluster as a graph, reduced until only a deadlock is left. Reads only.

An attempt that waits for blocks of a pool can move when the pool has enough free blocks, or when somebody who holds
blocks there can move, since everybody who can move ends some day. What cannot be shown to move this way is a cycle of
waits (Holt, Some deadlock properties of computer systems, 1972, section 4: graph reduction, with any holder enough).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from decode_svc.core import DecodeCore
from prefill_svc.core import PrefillCore
from sim.worker_node import WorkerNode

Attempt = tuple[str, int]
"""(request, attempt): the same one on both workers."""
NOBODY: Attempt = ("a write or a fence", 0)
"""Holds blocks until a write has ended; always comes to its end."""


@dataclass
class Snapshot:
    """holders and waiters by pool. Attempts that wait nowhere can move."""

    holders: dict[str, set[Attempt]] = field(default_factory=dict)
    waiters: dict[str, set[Attempt]] = field(default_factory=dict)


def find_cycle(workers: Iterable[WorkerNode]) -> set[Attempt]:
    """Attempts that wait for each other and for nobody else; empty if there are none."""
    snapshot = Snapshot()
    for worker in workers:
        core = worker.core
        if isinstance(core, PrefillCore):
            _see_prefill(snapshot, worker, core)
        elif isinstance(core, DecodeCore):
            _see_decode(snapshot, worker, core)
    return reduce(snapshot)


def reduce(snapshot: Snapshot) -> set[Attempt]:
    """The attempts that no order of endings could set free."""
    stuck = {a for waiting in snapshot.waiters.values() for a in waiting}
    moved = True
    while moved:
        moved = False
        for pool, waiting in snapshot.waiters.items():
            holders = snapshot.holders.get(pool, set())
            if waiting & stuck and (not holders or holders - stuck):
                still = {a for a in waiting & stuck if any(a in w for p, w in snapshot.waiters.items() if p != pool)}
                freed = (waiting & stuck) - still
                if freed:
                    stuck -= freed
                    moved = True
    return stuck


def _see_prefill(snapshot: Snapshot, worker: WorkerNode, core: PrefillCore) -> None:
    pool = worker.shape.name
    holders, waiters = snapshot.holders.setdefault(pool, set()), snapshot.waiters.setdefault(pool, set())
    for sequence in core._p.scheduler._sequences.values():
        attempt = (sequence.spec.key.request_id, sequence.spec.key.attempt)
        (holders if sequence.running or sequence.block_ids else waiters).add(attempt)
    if core._p.table.in_flight:
        holders.add(NOBODY)
    _room_for_all(snapshot, worker)


def _see_decode(snapshot: Snapshot, worker: WorkerNode, core: DecodeCore) -> None:
    """An attempt holds if one of its sequences does, or its ticket."""
    pool = worker.shape.name
    holders, waiters = snapshot.holders.setdefault(pool, set()), snapshot.waiters.setdefault(pool, set())
    waiting = {id(attempt) for attempt in core._waiting}
    for attempt in core._desk.attempts:
        if not attempt.running:
            (waiters if id(attempt) in waiting else holders).add((attempt.key.request_id, attempt.key.attempt))
    for sequence in core._p.scheduler._sequences.values():
        name = (sequence.spec.key.request_id, sequence.spec.key.attempt)
        (holders if sequence.running or sequence.block_ids else waiters).add(name)
    if worker.pool.counts().quarantined:
        holders.add(NOBODY)
    waiters -= holders
    _room_for_all(snapshot, worker)


def _room_for_all(snapshot: Snapshot, worker: WorkerNode) -> None:
    """Nobody holds anything: whoever waits is served."""
    if worker.pool.num_free == worker.pool.num_blocks:
        snapshot.waiters[worker.shape.name] = set()
