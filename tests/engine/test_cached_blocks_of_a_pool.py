"""Blocks that keep their content: which are evicted, in which order, and what is shared. Exact ids."""

from __future__ import annotations

import random
import re

import pytest
from specs import constant, key, spec, steps

from engine.block_pool import BlockPool, BlockState
from engine.budgets import Budgets
from engine.events import Matched
from engine.prefix_cache import Entry
from engine.scheduler import Scheduler
from kvrelay.blocks import BlockCounts, BlockEventKind, BlockRun, KeyScope, block_keys

SIZE = 2


def tokens_of(name: str, num_blocks: int) -> list[int]:
    return [ord(name) * 1000 + i for i in range(num_blocks * SIZE)]


def store(pool: BlockPool, name: str, num_blocks: int) -> tuple[tuple[int, ...], list[Entry]]:
    """The blocks of one sequence, all full and published, held by the caller."""
    blocks = pool.allocate(num_blocks)
    assert blocks is not None
    tokens, entries = tokens_of(name, num_blocks), []
    parent: Entry | None = None
    for i, block_key in enumerate(block_keys(KeyScope("t", "f"), tokens, SIZE)):
        parent = pool.publish(blocks[i], block_key, tokens[i * SIZE : (i + 1) * SIZE], parent)
        assert parent is not None
        entries.append(parent)
    return blocks, entries


def found(pool: BlockPool, name: str, num_blocks: int) -> list[int | None]:
    assert pool.cache is not None
    tokens = tokens_of(name, num_blocks)
    return [e.block_id for e in pool.cache.match(block_keys(KeyScope("t", "f"), tokens, SIZE), tokens, SIZE)]


def test_released_blocks_with_a_key_are_cached_and_the_others_free() -> None:
    pool = BlockPool(6, cache=True)
    blocks, _ = store(pool, "a", 2)
    rest = pool.allocate(1) or ()
    pool.release(blocks + rest)
    assert [pool.state(i) for i in (0, 1, 2)] == [BlockState.CACHED, BlockState.CACHED, BlockState.FREE]
    assert pool.counts() == BlockCounts(total=6, free=4, cached=2)
    assert pool.num_free == 6
    assert found(pool, "a", 2) == [0, 1]
    pool.check_integrity()


def test_free_blocks_go_first_then_the_longest_unused_the_deepest_of_a_sequence_first() -> None:
    pool = BlockPool(7, cache=True)
    a, _ = store(pool, "a", 3)
    b, _ = store(pool, "b", 3)
    pool.release(b)
    pool.release(a)
    assert pool.allocate(1) == (6,)
    assert pool.allocate(2) == (5, 4)
    assert (found(pool, "b", 3), found(pool, "a", 3)) == ([3], [0, 1, 2])
    assert pool.reserve(2, epoch=1) == (3, 2), "a ticket evicts as well"
    assert (found(pool, "b", 3), found(pool, "a", 3)) == ([], [0, 1])
    assert pool.cache is not None
    assert pool.cache.take_events()[1].kind is BlockEventKind.EVICTED
    pool.check_integrity()


def test_what_is_left_of_any_sequence_is_a_prefix_whatever_was_taken() -> None:
    for seed in range(200):
        draw = random.Random(seed)
        pool = BlockPool(24, cache=True)
        lengths = {name: draw.randint(1, 4) for name in "abcdef"}
        held = {name: store(pool, name, n)[0] for name, n in lengths.items()}
        for name in draw.sample("abcdef", 6):
            pool.release(held[name])
        for _ in range(draw.randint(1, 6)):
            assert pool.allocate(draw.randint(0, 4)) is not None
            pool.check_integrity()
        assert pool.cache is not None
        left = sum(len(found(pool, name, n)) for name, n in lengths.items())
        assert left == len(pool.cache) == pool.counts().cached, f"seed {seed}: one is cached and cannot be found"


def test_blocks_held_again_are_not_evicted_and_rest_longest_afterwards() -> None:
    pool = BlockPool(4, cache=True)
    a, entries = store(pool, "a", 2)
    b, _ = store(pool, "b", 2)
    pool.release(a)
    pool.release(b)
    assert pool.num_cached(entries) == 2
    assert pool.hold(entries) == (0, 1)
    assert (pool.num_cached(entries), pool.num_free, pool.references(0)) == (0, 2, 1)
    assert pool.allocate(3) is None
    pool.release(a)
    assert pool.allocate(3) == (3, 2, 1)
    assert found(pool, "a", 2) == [0]
    pool.check_integrity()


def test_holding_what_others_hold_counts_a_reference_more() -> None:
    pool = BlockPool(3, cache=True)
    a, entries = store(pool, "a", 2)
    assert pool.hold(entries[:1]) == (0,)
    assert [pool.references(i) for i in a] == [2, 1]
    pool.release(a)
    assert [pool.state(i) for i in a] == [BlockState.HELD, BlockState.CACHED]
    pool.release((0,))
    assert pool.counts() == BlockCounts(total=3, free=1, cached=2)
    pool.check_integrity()


def test_a_shared_prefix_outlives_the_deeper_blocks_of_both_who_used_it() -> None:
    """Both release the same first block; it is as recently used as the younger one."""
    pool = BlockPool(4, cache=True)
    a, entries = store(pool, "a", 2)
    pool.hold(entries[:1])
    pool.release(a)
    other = pool.allocate(1) or ()
    pool.release((a[0], *other))
    assert pool.allocate(3) == (3, 2, 1)
    assert found(pool, "a", 2) == [0]


def test_publishing_what_another_block_holds_leaves_this_one_without_a_key() -> None:
    pool = BlockPool(4, cache=True)
    store(pool, "a", 1)
    b, entries = store(pool, "a", 1)
    assert (b, entries[0].block_id) == ((1,), 0)
    pool.release((0, 1))
    assert pool.counts() == BlockCounts(total=4, free=3, cached=1)
    pool.check_integrity()


def test_a_cached_block_that_loses_its_key_to_other_content_is_free() -> None:
    pool = BlockPool(4, cache=True)
    a, _ = store(pool, "a", 1)
    pool.release(a)
    (key_of_a,) = block_keys(KeyScope("t", "f"), tokens_of("a", 1), SIZE)
    (other,) = pool.allocate(1) or ()
    pool.publish(other, key_of_a, (5, 5), None)
    assert pool.state(0) is BlockState.FREE
    assert pool.counts() == BlockCounts(total=4, free=3, held=1)
    pool.check_integrity()


def test_only_a_sole_owner_of_unkeyed_content_may_write() -> None:
    pool = BlockPool(4, cache=True)
    (plain,) = pool.allocate(1) or ()
    (keyed,), _ = store(pool, "a", 1)
    assert (pool.is_writable(plain), pool.is_writable(keyed)) == (True, False)
    pool.retain((plain,))
    assert (pool.is_writable(plain), pool.is_writable(plain, others=1)) == (False, True)
    pool.disown((keyed,))
    assert pool.is_writable(keyed)
    assert found(pool, "a", 1) == []
    pool.retain((keyed,))
    with pytest.raises(AssertionError, match="block 1 has 2 references"):
        pool.disown((keyed,))


def test_clearing_frees_what_is_cached_and_unkeys_what_is_held() -> None:
    pool = BlockPool(4, cache=True)
    a, _ = store(pool, "a", 2)
    b, _ = store(pool, "b", 1)
    pool.release(a)
    pool.clear_cache()
    assert pool.counts() == BlockCounts(total=4, free=3, held=1)
    assert found(pool, "b", 1) == []
    pool.release(b)
    assert pool.counts() == BlockCounts(total=4, free=4)
    assert pool.cache is not None
    assert pool.cache.take_events() == (BlockRun(BlockEventKind.CLEARED),)
    pool.check_integrity()


def test_a_pool_without_a_cache_keeps_nothing() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1) or ()
    (some_key,) = block_keys(KeyScope("t", "f"), (1, 2), SIZE)
    assert pool.publish(blocks[0], some_key, (1, 2), None) is None
    pool.clear_cache()
    pool.release(blocks)
    assert pool.counts() == BlockCounts(total=2, free=2)
    assert pool.cache is None


def test_integrity_check_finds_a_cached_block_without_a_key() -> None:
    pool = BlockPool(2, cache=True)
    blocks, _ = store(pool, "a", 1)
    pool.release(blocks)
    assert pool.cache is not None
    pool.cache.drop(0)
    with pytest.raises(AssertionError, match=re.escape("block 0: key and CACHED")):
        pool.check_integrity()


def test_a_of_50_tokens_and_b_of_40_share_their_first_two_blocks() -> None:
    """A has blocks 1, 4, 7, 2; B 1, 4, 8: the first two full, shared, read-only, two references (block size 16)."""
    pool = BlockPool(9, cache=True)
    pool.allocate(9)
    pool.release((1, 4, 7, 2, 8))
    scheduler = Scheduler(pool, 16, Budgets())
    shared = range(32)
    a = spec("a", [*shared, *range(100, 118)], max_tokens=8)
    b = spec("b", [*shared, *range(200, 208)], max_tokens=8)
    scheduler.add(a)
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.apply(plan, constant(plan))
    scheduler.add(b)
    plan = scheduler.schedule()
    assert plan is not None
    events = scheduler.apply(plan, constant(plan))
    tables = {s.key.request_id: s.table.block_ids for s in plan.slices}
    assert tables == {"a": (1, 4, 7, 2), "b": (1, 4, 8)}
    assert Matched(key("b"), 32) in events
    assert [pool.references(i) for i in (1, 4, 7, 2, 8)] == [2, 2, 1, 1, 1]
    assert [pool.is_writable(i) for i in (1, 4, 7, 2, 8)] == [False, False, False, True, True]


def test_a_shared_prefix_of_2_010_tokens_hits_125_blocks_and_210_tokens_are_left() -> None:
    pool = BlockPool(300, cache=True)
    scheduler = Scheduler(pool, 16, Budgets(max_tokens=4096))
    for name, own in (("a", 1), ("b", 2)):
        scheduler.add(spec(name, [*(i % 251 for i in range(2_010)), *[own] * 200]))
        (plan, events), *_ = steps(scheduler)
    assert Matched(key("b"), 2_000) in events
    assert plan.num_tokens == 210
    assert round(100 * plan.num_tokens / 2_210, 1) == 9.5
