"""What must hold after every step: one owner set per block, counts that add up. Reads, never acts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from coordinator.states import Phase
from decode_svc.core import DecodeCore
from engine.block_pool import BlockState
from engine.plan import Plan
from engine.scheduler import Scheduler
from kvtransfer.receiver import TicketState
from prefill_svc.core import PrefillCore
from sim.world import Violation

if TYPE_CHECKING:
    from sim.coordinator_node import CoordinatorNode
    from sim.worker_node import WorkerNode

PROMISED = (BlockState.RESERVED, BlockState.QUARANTINED)


def check_worker(worker: WorkerNode) -> None:
    """Between steps every block belongs to exactly those who say that they hold it."""
    try:
        worker.pool.check_integrity()
    except AssertionError as error:
        raise Violation(f"{worker.incarnation}: {error}") from error
    core = worker.core
    held = Counter(_sequence_blocks(core._p.scheduler))
    promised: Counter[int] = Counter()
    if isinstance(core, DecodeCore):
        held.update(b for a in core._desk.attempts for b in a.block_ids)
        for ticket in core._p.table._tickets.values():
            promised.update(ticket.promised)
            if ticket.state is not TicketState.QUARANTINED:
                held.update(ticket.ticket.table.block_ids[: ticket.ticket.num_cached_blocks])
    elif isinstance(core, PrefillCore):
        for writing in core._p.table._tickets.values():
            for part in (*writing.queued, *writing.posted, *writing.failed):
                held.update(part.source_ids)
    pool = worker.pool
    references = {block: n for block, n in enumerate(pool._references) if n}
    reserved = {block: 1 for block, state in enumerate(pool._states) if state in PROMISED}
    if references != held or reserved != promised:
        _name_wrong_block(worker, held, promised)
    _check_sums(core._p.scheduler)


def _name_wrong_block(worker: WorkerNode, held: Counter[int], promised: Counter[int]) -> None:
    pool = worker.pool
    for block in range(pool.num_blocks):
        state = pool.state(block)
        owners = (held[block], promised[block])
        right = (pool.references(block), int(state in PROMISED))
        if owners != right:
            raise Violation(f"{worker.incarnation}: block {block} is {state.name}, owners (held, promised) {owners}")
    raise Violation(f"{worker.incarnation}: blocks {sorted({*held, *promised})} have owners, of {pool.num_blocks}")


def _sequence_blocks(scheduler: Scheduler) -> Iterator[int]:
    """Blocks of sequences, and those that the step under way still reads after they lost them."""
    sequences = {id(s): s for s in scheduler._sequences.values()}
    sequences |= {id(s): s for s in (*scheduler._ended, *scheduler._planned)}
    for sequence in sequences.values():
        yield from sequence.block_ids
    room = scheduler.room
    yield from room._sources.elements()
    yield from room._leaving.elements()
    yield from room._emptied


def _check_sums(scheduler: Scheduler) -> None:
    """What the scheduler counts as it goes along is what there is."""
    running = [s for s in scheduler._sequences.values() if s.running]
    promised = sum(s.promised for s in running)
    if scheduler._queues.promised != promised:
        raise Violation(f"{scheduler._queues.promised} blocks are promised, and to running sequences {promised}")
    uncomputed = sum(s.num_uncomputed for s in scheduler._sequences.values())
    if scheduler.queued_tokens != uncomputed and scheduler._plan is None:
        raise Violation(f"{scheduler.queued_tokens} tokens are queued, and {uncomputed} not computed")


def check_plan(worker: WorkerNode, plan: Plan) -> None:
    """When a step runs, every block that it reads or writes is still held: nobody else may write to it."""
    blocks = {block for block, _ in plan.swap_out} | {block for _, block in plan.swap_in}
    blocks.update(*plan.copies, *(rows.table.block_ids for rows in plan.slices))
    loose = sorted(block for block in blocks if worker.pool.state(block) is not BlockState.HELD)
    if loose:
        raise Violation(f"{worker.incarnation}: step {plan.step_id} works on blocks {loose}, which nobody holds")


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
    blocks, slots = load.blocks, worker.core._p.scheduler.room.free_slots
    left = load.running or load.waiting or load.transfers_in_flight or load.queued_tokens
    left = left or len(worker.core._desk.attempts)
    if blocks.free + blocks.cached == blocks.total and not left and slots == worker.shape.swap_slots:
        return ""
    return f"{worker.incarnation}: {load}, {worker.shape.swap_slots - slots} blocks in host memory"


def knows_wrong(coordinator: CoordinatorNode, worker: WorkerNode) -> str:
    """Empty if what the coordinator knows of the worker's cache is what it caches; else how they differ.

    To be asked when nothing happens any more: news of a cache may be some time under way, or has to be asked for.
    """
    name = worker.description.worker_id
    roster = coordinator.roster
    session = roster._sessions.get(name) if name in roster._loads else None
    if session is None or session.description.incarnation != worker.incarnation:
        return f"{coordinator.name} has no session with {worker.incarnation}"
    cache = worker.pool.cache
    there = {entry.key.digest for entry in cache._by_key.values()} if cache is not None else set()
    holder = roster._cached.index._holders.get(name)
    known = holder.digests if holder is not None else set()
    if known == there and (holder is None or not holder.held):
        return ""
    missing, extra = len(there - known), len(known - there)
    held = len(holder.held) if holder is not None else 0
    words = f"{missing} missing, {extra} too many, {held} values of events held"
    return f"{coordinator.name} knows of {len(there)} blocks that {name} caches: {words}"
