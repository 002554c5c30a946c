"""What must hold after every step: one owner set per block, counts that add up. Reads, never acts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from coordinator.states import Phase
from decode_svc.core import DecodeCore
from engine.block_pool import BlockState
from prefill_svc.core import PrefillCore
from sim.coordinator_node import CoordinatorNode
from sim.worker_node import WorkerNode
from sim.world import Violation


def check_worker(worker: WorkerNode) -> None:
    """Between steps every block belongs to exactly those who say that they hold it."""
    try:
        worker.pool.check_integrity()
    except AssertionError as error:
        raise Violation(f"{worker.incarnation}: {error}") from error
    core = worker.core
    held = Counter(_sequence_blocks(worker))
    promised: Counter[int] = Counter()
    if isinstance(core, DecodeCore):
        held.update(b for a in core._desk.attempts for b in a.block_ids)
        for ticket in core._p.table._tickets.values():
            promised.update(ticket.promised)
    elif isinstance(core, PrefillCore):
        for writing in core._p.table._tickets.values():
            for part in (*writing.queued, *writing.posted, *writing.failed):
                held.update(part.source_ids)
    pool = worker.pool
    for block in range(pool.num_blocks):
        state = pool.state(block)
        owners = (held[block], promised[block])
        if state is BlockState.HELD:
            right = (pool.references(block), 0)
        elif state in (BlockState.RESERVED, BlockState.QUARANTINED):
            right = (0, 1)
        else:
            right = (0, 0)
        if owners != right:
            raise Violation(f"{worker.incarnation}: block {block} is {state.name}, owners (held, promised) {owners}")


def _sequence_blocks(worker: WorkerNode) -> Iterable[int]:
    scheduler = worker.core._p.scheduler
    sequences = {id(s): s for s in scheduler._sequences.values()}
    sequences |= {id(s): s for s in (*scheduler._ended, *scheduler._planned)}
    return (block for sequence in sequences.values() for block in sequence.block_ids)


def check_coordinator(coordinator: CoordinatorNode) -> None:
    """Every open request waits in the queue or has a placement, never both; states add up."""
    dispatcher = coordinator.dispatcher
    queued = {live.id for live in dispatcher._queue.lives()}
    for live in dispatcher._live.values():
        waits = live.state.phase is Phase.QUEUED
        if waits != (live.id in queued) or waits != (live.state.placement is None and live.finish is None):
            raise Violation(f"{live.id} is {live.state.phase.value}, queued: {live.id in queued}")
    if len(queued) != len(dispatcher._queue):
        raise Violation("a request waits twice")


def holds_nothing(worker: WorkerNode) -> str:
    """Empty if all blocks are free or cached, nothing runs, waits or is in flight; else what is left."""
    load = worker.core.load(worker.node.clock())
    blocks = load.blocks
    if blocks.free + blocks.cached == blocks.total and not (load.running or load.waiting or load.transfers_in_flight):
        return ""
    return f"{worker.incarnation}: {load}"
