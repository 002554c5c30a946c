"""Contents by key: what is found, what gives way, and what is told of it, in order."""

from __future__ import annotations

import pytest

from engine.prefix_cache import Entry, PrefixCache
from kvrelay.blocks import BlockEventKind, BlockKey, BlockRun, KeyScope, block_keys

SIZE = 2
TOKENS = (1, 2, 3, 4, 5, 6)
KEYS = block_keys(KeyScope("t", "f"), TOKENS, SIZE)
OTHER = block_keys(KeyScope("t", "f"), (9, 9, 3, 4), SIZE)
STORED, EVICTED, CLEARED = BlockEventKind.STORED, BlockEventKind.EVICTED, BlockEventKind.CLEARED


def filled(block_ids: tuple[int, ...] = (7, 4, 5)) -> tuple[PrefixCache, list[Entry]]:
    """The three blocks of TOKENS."""
    cache, parent, entries = PrefixCache(), None, []
    for i, block_id in enumerate(block_ids):
        parent, lost = cache.publish(block_id, KEYS[i], TOKENS[i * SIZE : (i + 1) * SIZE], parent)
        assert lost is None
        entries.append(parent)
    cache.check_integrity()
    return cache, entries


def ids(entries: list[Entry]) -> list[int | None]:
    return [entry.block_id for entry in entries]


def test_the_longest_cached_prefix_is_found_block_by_block() -> None:
    cache, entries = filled()
    assert cache.match(KEYS, TOKENS, SIZE) == entries
    assert ids(cache.match(KEYS[:2], TOKENS, SIZE)) == [7, 4]
    assert ids(cache.match((KEYS[0], OTHER[1]), (1, 2, 3, 4), SIZE)) == [7]
    assert cache.match(OTHER, (9, 9, 3, 4), SIZE) == []
    assert cache.match((), (), SIZE) == []


def test_the_same_content_is_kept_once() -> None:
    cache, entries = filled()
    assert cache.publish(9, KEYS[1], (3, 4), entries[0]) == (entries[1], None)
    assert (len(cache), 9 in cache, 4 in cache) == (3, False, True)
    cache.check_integrity()


def test_a_key_with_other_tokens_is_a_miss_and_the_newer_content_takes_its_place() -> None:
    cache, entries = filled()
    assert cache.match(KEYS, (1, 2, 3, 9, 5, 6), SIZE) == entries[:1]
    newer, lost = cache.publish(9, KEYS[1], (3, 9), entries[0])
    assert (newer.block_id, lost) == (9, 4)
    assert (entries[1].block_id, 4 in cache) == (None, False)
    assert cache.match(KEYS, (1, 2, 3, 9, 5, 6), SIZE) == [entries[0], newer], "the third hangs on what was there"
    assert cache.match(KEYS, TOKENS, SIZE) == entries[:1]
    cache.check_integrity()


def test_what_hangs_on_a_block_that_is_gone_is_not_found_until_its_parent_is_published_again() -> None:
    cache, entries = filled()
    cache.drop(4)
    assert cache.match(KEYS, TOKENS, SIZE) == entries[:1]
    assert [5 in cache, entries[2].block_id] == [True, 5]
    again, _ = cache.publish(8, KEYS[1], (3, 4), entries[0])
    assert cache.match(KEYS, TOKENS, SIZE) == [entries[0], again]
    new, lost = cache.publish(5, KEYS[2], (5, 6), again)
    assert lost is None, "it was the same block"
    assert cache.match(KEYS, TOKENS, SIZE) == [entries[0], again, new]
    assert ids([entries[0], again, new]) == [7, 8, 5]
    cache.check_integrity()


def test_a_block_known_by_a_key_may_not_get_another() -> None:
    cache, entries = filled()
    cache.publish(5, OTHER[0], (9, 9), None)
    assert entries[2].block_id is None
    assert cache.match(OTHER, (9, 9, 3, 4), SIZE)[0].block_id == 5
    cache.check_integrity()


def test_dropping_an_unknown_block_is_no_event() -> None:
    cache = PrefixCache()
    cache.drop(3)
    assert cache.take_events() == ()


def test_events_come_in_order_in_runs_of_a_kind_and_once() -> None:
    cache, entries = filled()
    cache.drop(5)
    cache.drop(4)
    cache.publish(4, KEYS[1], (3, 4), entries[0])
    assert cache.take_events() == (
        BlockRun(STORED, KEYS),
        BlockRun(EVICTED, (KEYS[2], KEYS[1])),
        BlockRun(STORED, (KEYS[1],)),
    )
    assert cache.take_events() == ()
    cache.publish(9, KEYS[1], (3, 9), entries[0])
    assert cache.take_events() == (BlockRun(EVICTED, (KEYS[1],)), BlockRun(STORED, (KEYS[1],)))


def test_clearing_is_one_event_that_stands_for_all_before_it() -> None:
    cache, entries = filled()
    cache.clear()
    assert (len(cache), cache.keys(), ids(entries)) == (0, (), [None, None, None])
    cache.publish(1, OTHER[0], (9, 9), None)
    assert cache.take_events() == (BlockRun(CLEARED), BlockRun(STORED, (OTHER[0],)))
    assert cache.take_events() == ()
    cache.check_integrity()


def test_keys_are_those_of_everything_cached_now() -> None:
    cache, _ = filled()
    cache.drop(4)
    assert set(cache.keys()) == {KEYS[0], KEYS[2]}


def test_events_replayed_by_a_reader_give_the_same_keys() -> None:
    cache, entries = filled()
    seen: set[BlockKey] = set()
    cache.drop(5)
    cache.publish(9, KEYS[1], (3, 9), entries[0])
    for run in cache.take_events():
        seen = seen | set(run.keys) if run.kind is STORED else seen - set(run.keys)
    assert seen == set(cache.keys())


def test_integrity_check_finds_a_key_that_leads_nowhere() -> None:
    cache, entries = filled()
    entries[1].block_id = 6
    with pytest.raises(AssertionError, match="entry of block 4 names block 6"):
        cache.check_integrity()
    entries[1].block_id = 4
    del cache._by_key[KEYS[1].digest]
    with pytest.raises(AssertionError, match="differ in number"):
        cache.check_integrity()
