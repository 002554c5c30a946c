"""Block states: exact ids, and every transition that is not drawn is refused."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

import pytest

from engine.block_pool import BlockPool, BlockState
from kvrelay.blocks import BlockCounts, KeyScope, block_keys

EPOCH = 5


def test_a_fresh_pool_gives_the_lowest_ids_first() -> None:
    pool = BlockPool(6)
    assert pool.allocate(2) == (0, 1)
    assert pool.reserve(1, EPOCH) == (2,)
    assert pool.allocate(3) == (3, 4, 5)
    assert pool.num_free == 0


def test_freed_blocks_are_reused_in_the_order_they_were_freed_after_all_fresh_ones() -> None:
    pool = BlockPool(6)
    pool.allocate(4)
    pool.release((3, 1))
    pool.release((0,))
    assert pool.allocate(5) == (4, 5, 3, 1, 0)


def test_asking_for_too_many_takes_nothing() -> None:
    pool = BlockPool(3)
    assert pool.allocate(4) is None
    assert pool.reserve(4, EPOCH) is None
    assert pool.counts() == BlockCounts(total=3, free=3)
    assert pool.allocate(0) == ()
    assert pool.allocate(3) == (0, 1, 2)


def test_a_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="num_blocks must be at least 1, got 0"):
        BlockPool(0)


def test_two_requests_share_their_full_blocks_and_only_those() -> None:
    """A has 50 tokens in blocks 1, 4, 7, 2; B has 40 in 1, 4, 8: two full blocks shared, block size 16."""
    pool = BlockPool(9)
    pool.allocate(9)
    pool.release((1, 4, 7, 2, 8))
    a = pool.allocate(4)
    assert a == (1, 4, 7, 2)
    pool.retain(a[:2])
    b = (*a[:2], *(pool.allocate(1) or ()))
    assert b == (1, 4, 8)
    assert [pool.references(i) for i in (1, 4, 7, 2, 8)] == [2, 2, 1, 1, 1]
    assert pool.num_sole(b) == 1
    pool.release(b)
    assert [pool.state(i) for i in a] == [BlockState.HELD] * 4
    assert pool.num_free == 1
    pool.release(a)
    assert pool.allocate(5) == (8, 1, 4, 7, 2)


def test_a_ticket_that_lands_hands_its_blocks_to_the_caller() -> None:
    pool = BlockPool(4)
    assert pool.reserve(3, EPOCH) == (0, 1, 2)
    assert pool.counts() == BlockCounts(total=4, free=1, reserved=3)
    pool.hold_reserved((0, 1, 2), EPOCH)
    assert pool.counts() == BlockCounts(total=4, free=1, held=3)
    assert [pool.references(i) for i in range(3)] == [1, 1, 1]
    pool.release((0, 1, 2))
    assert pool.counts() == BlockCounts(total=4, free=4)
    assert pool.epoch(0) == EPOCH


def test_a_ticket_that_ends_early_frees_at_once_or_through_quarantine() -> None:
    pool = BlockPool(4)
    pool.reserve(2, 1)
    pool.reserve(2, 2)
    pool.free_reserved((0, 1), 1)
    pool.quarantine((2, 3), 2)
    assert pool.counts() == BlockCounts(total=4, free=2, quarantined=2)
    assert pool.allocate(3) is None
    pool.free_reserved((2, 3), 2)
    assert pool.allocate(4) == (0, 1, 2, 3)


def _publish(pool: BlockPool) -> None:
    (key,) = block_keys(KeyScope("t", "f"), (1, 2), 2)
    pool.publish(0, key, (1, 2), None)


OPERATIONS: dict[str, Callable[[BlockPool], None]] = {
    "retain": lambda pool: pool.retain((0,)),
    "release": lambda pool: pool.release((0,)),
    "hold_reserved": lambda pool: pool.hold_reserved((0,), EPOCH),
    "quarantine": lambda pool: pool.quarantine((0,), EPOCH),
    "free_reserved": lambda pool: pool.free_reserved((0,), EPOCH),
    "publish": _publish,
    "disown": lambda pool: pool.disown((0,)),
}
LEGAL = {
    ("HELD", "publish"),
    ("HELD", "disown"),
    ("HELD", "retain"),
    ("HELD", "release"),
    ("RESERVED", "hold_reserved"),
    ("RESERVED", "quarantine"),
    ("RESERVED", "free_reserved"),
    ("QUARANTINED", "free_reserved"),
}


def pool_with_block_0(state: str) -> BlockPool:
    pool = BlockPool(2, cache=True)
    if state in {"HELD", "CACHED"}:
        pool.allocate(1)
    if state == "CACHED":
        _publish(pool)
        pool.release((0,))
    if state in {"RESERVED", "QUARANTINED"}:
        pool.reserve(1, EPOCH)
    if state == "QUARANTINED":
        pool.quarantine((0,), EPOCH)
    return pool


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("state", ["FREE", "HELD", "CACHED", "RESERVED", "QUARANTINED"])
def test_every_state_and_operation_is_either_legal_or_names_block_and_state(state: str, operation: str) -> None:
    pool = pool_with_block_0(state)
    before = pool.counts()
    if (state, operation) in LEGAL:
        OPERATIONS[operation](pool)
    else:
        with pytest.raises(AssertionError, match=f"block 0 is {state}"):
            OPERATIONS[operation](pool)
        assert pool.counts() == before
    pool.check_integrity()


@pytest.mark.parametrize("operation", ["hold_reserved", "quarantine", "free_reserved"])
def test_a_ticket_cannot_touch_the_blocks_of_another_epoch(operation: str) -> None:
    pool = BlockPool(2)
    pool.reserve(1, EPOCH + 1)
    with pytest.raises(AssertionError, match=re.escape("block 0 is RESERVED under epoch 6, not 5")):
        OPERATIONS[operation](pool)


def test_releasing_a_block_twice_is_caught_even_when_named_twice_in_one_call() -> None:
    pool = BlockPool(2)
    pool.allocate(1)
    with pytest.raises(AssertionError, match="block 0 is FREE, must be HELD to become FREE"):
        pool.release((0, 0))


@pytest.mark.parametrize("block_id", [-1, 2])
def test_a_block_outside_the_pool_is_caught(block_id: int) -> None:
    with pytest.raises(AssertionError, match=f"block {block_id} is not in a pool of 2"):
        BlockPool(2).retain((block_id,))


def test_integrity_check_finds_a_lost_block() -> None:
    pool = BlockPool(3)
    pool.check_integrity()
    pool._free.pop()
    with pytest.raises(AssertionError, match="block 2 is FREE, queue differs"):
        pool.check_integrity()


def test_after_any_mix_of_operations_the_counts_add_up_and_nothing_is_lost() -> None:
    for seed in range(50):
        random_ = random.Random(seed)
        pool = BlockPool(random_.randint(1, 20))
        held: list[tuple[int, ...]] = []
        tickets: list[tuple[tuple[int, ...], int]] = []
        for epoch in range(1, 80):
            match random_.randrange(6):
                case 0:
                    held += filter(None, [pool.allocate(random_.randint(1, 5))])
                case 1:
                    tickets += [(ids, epoch) for ids in [pool.reserve(random_.randint(1, 5), epoch)] if ids]
                case 2 if held:
                    held.append(random_.choice(held))
                    pool.retain(held[-1])
                case 3 if held:
                    pool.release(held.pop(random_.randrange(len(held))))
                case 4 if tickets:
                    ids, owner = tickets.pop()
                    pool.hold_reserved(ids, owner)
                    held.append(ids)
                case 5 if tickets:
                    ids, owner = tickets.pop()
                    if random_.random() < 0.5:
                        pool.quarantine(ids, owner)
                    pool.free_reserved(ids, owner)
            pool.check_integrity()
        for ids in held:
            pool.release(ids)
        for ids, owner in tickets:
            pool.free_reserved(ids, owner)
        assert pool.counts() == BlockCounts(pool.num_blocks, pool.num_blocks)
