"""The simulator's checks find what they are for: each is shown something wrong and something right."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvrelay.requests import Role
from sim.checks import check_worker, holds_nothing
from sim.memory import Fabric, LedgerPool
from sim.network import Network
from sim.shapes import WorkerShape
from sim.waits import NOBODY, Snapshot, reduce
from sim.worker_node import WorkerNode
from sim.world import Violation, World, dropping_what_is_left

A, B, C = ("a", 0), ("b", 0), ("c", 0)


@pytest.fixture
def worker() -> Iterator[WorkerNode]:
    """A decode worker that has just started and does not run."""
    world = World(3)
    shape = WorkerShape(Role.DECODE, "w", ("nobody:1",), "nixl", 8, 32, 4, 0.01)
    with dropping_what_is_left():
        made = WorkerNode(world, Network(world), Fabric(world), shape, 1)
        yield made
        made.engine.get_coro().close()


def test_a_block_that_nobody_says_he_holds_is_found(worker: WorkerNode) -> None:
    check_worker(worker)
    worker.pool.allocate(1)
    with pytest.raises(Violation, match=r"block 0 is HELD, owners \(held, promised\) \(0, 0\)"):
        check_worker(worker)


def test_a_promise_without_a_ticket_is_found(worker: WorkerNode) -> None:
    worker.pool.reserve(2, 1)
    with pytest.raises(Violation, match="RESERVED"):
        check_worker(worker)
    assert "reserved=2" in holds_nothing(worker)


def test_counts_that_do_not_add_up_are_found(worker: WorkerNode) -> None:
    worker.pool._counts[0] -= 1
    with pytest.raises(Violation, match="counted as"):
        check_worker(worker)


def test_a_block_with_a_live_writer_is_not_freed(worker: WorkerNode) -> None:
    pool = worker.pool
    assert pool.member is not None
    blocks = pool.reserve(2, 7)
    assert blocks == (0, 1)
    pool.member.writable[1] = 1
    with pytest.raises(Violation, match=r"blocks \[1\] of ticket 7 are freed"):
        pool.free_reserved(blocks, 7)


def test_a_ticket_whose_bytes_have_not_all_landed_is_not_held(worker: WorkerNode) -> None:
    pool = worker.pool
    assert pool.member is not None
    pool.member.expected = lambda _: {0, 1}
    pool.reserve(3, 7)
    pool.member.complete[7] = {0}
    with pytest.raises(Violation, match=r"blocks \[1\] have not all their bytes"):
        pool.hold_reserved((0, 1, 2), 7)
    pool.member.complete[7] = {0, 1}
    pool.hold_reserved((0, 1, 2), 7)


def test_a_pool_without_a_ledger_is_a_pool() -> None:
    pool = LedgerPool(4)
    pool.reserve(2, 1)
    pool.free_reserved((0, 1), 1)
    assert pool.counts().free == 4


@pytest.mark.parametrize(
    ("holders", "waiters", "stuck"),
    [
        ({"p": {A}}, {"p": {B}}, set()),
        ({"p": {A}, "d": {B}}, {"p": {B}, "d": {A}}, {A, B}),
        ({"p": {A, C}, "d": {B}}, {"p": {B}, "d": {A}}, set()),
        ({"p": {A, NOBODY}, "d": {B}}, {"p": {B}, "d": {A}}, set()),
        ({"p": {A}, "d": {B}, "e": {C}}, {"p": {B}, "d": {C}, "e": {A}}, {A, B, C}),
        ({}, {"p": {A}}, set()),
        ({"p": {A}}, {"p": {A}}, {A}),
    ],
)
def test_a_cycle_of_waits_is_what_reduction_leaves(
    holders: dict[str, set[tuple[str, int]]], waiters: dict[str, set[tuple[str, int]]], stuck: set[tuple[str, int]]
) -> None:
    assert reduce(Snapshot(holders, waiters)) == stuck
