"""The index of cached blocks against a plain model: events, gaps, lists, workers that come and go."""

from __future__ import annotations

import random
from collections.abc import Sequence

from coordinator import prefix_index
from coordinator.prefix_index import PrefixIndex
from kvrelay.blocks import BlockEventKind, BlockEvents, BlockKey, BlockList, BlockRun, KeyScope, block_keys
from kvrelay.requests import WorkerId

A, B, C = WorkerId("a"), WorkerId("b"), WorkerId("c")
STORED, EVICTED, CLEARED = BlockEventKind.STORED, BlockEventKind.EVICTED, BlockEventKind.CLEARED
KEYS = block_keys(KeyScope("default", "f"), range(16 * 40), 16)


def stored(first: int, *keys: BlockKey) -> BlockEvents:
    return BlockEvents(first, (BlockRun(STORED, keys),))


def evicted(first: int, *keys: BlockKey) -> BlockEvents:
    return BlockEvents(first, (BlockRun(EVICTED, keys),))


def test_depths_count_blocks_from_the_first_on_without_a_hole() -> None:
    index = PrefixIndex()
    assert index.apply(A, stored(1, *KEYS[:5]))
    assert index.apply(B, stored(1, *KEYS[:2], *KEYS[3:6]))
    assert index.apply(C, stored(1, *KEYS[1:6]))
    assert index.depths(KEYS) == {A: 5, B: 2}
    assert index.depths(KEYS[:1]) == {A: 1, B: 1}
    assert index.depths(KEYS[1:]) == {A: 4, B: 1, C: 5}
    assert index.depths(()) == {}
    assert (index.num_keys(A), index.num_keys(B), index.num_keys(C), len(index)) == (5, 5, 5, 6)


def test_what_was_evicted_or_cleared_is_gone_and_leaves_nothing_behind() -> None:
    index = PrefixIndex()
    index.apply(A, stored(1, *KEYS[:5]))
    index.apply(B, stored(1, *KEYS[:5]))
    assert index.apply(A, evicted(6, KEYS[4], KEYS[3]))
    assert index.depths(KEYS) == {A: 3, B: 5}
    assert index.apply(A, BlockEvents(8, (BlockRun(CLEARED), BlockRun(STORED, KEYS[:1]))))
    assert index.depths(KEYS) == {A: 1, B: 5}
    index.forget(B)
    index.forget(A)
    assert (index.depths(KEYS), len(index)) == ({}, 0)


def test_a_gap_is_told_and_what_came_behind_it_counts_once_the_list_is_there() -> None:
    index = PrefixIndex()
    assert index.apply(A, stored(1, KEYS[0]))
    assert not index.apply(A, stored(4, KEYS[3]))
    assert not index.apply(A, evicted(5, KEYS[2]))
    assert index.depths(KEYS) == {A: 1}
    assert index.replace(A, BlockList(4, KEYS[:3]))
    assert (index.depths(KEYS), index.num_keys(A)) == ({A: 2}, 3)
    assert index.apply(A, stored(6, KEYS[2]))
    assert index.depths(KEYS) == {A: 4}


def test_events_that_the_list_knows_of_already_are_not_taken_again() -> None:
    index = PrefixIndex()
    assert not index.apply(A, stored(3, KEYS[2], KEYS[3]))
    assert index.replace(A, BlockList(6, KEYS[:2]))
    assert index.depths(KEYS) == {A: 2}
    assert index.apply(A, BlockEvents(4, (BlockRun(STORED, KEYS[5:6]), BlockRun(EVICTED, KEYS[1:2] + KEYS[:1]))))
    assert index.num_keys(A) == 1, "5 was known, 6 is new: key 0 goes, key 1 stays"
    assert index.depths(KEYS[1:]) == {A: 1}


def test_a_list_that_is_too_old_to_close_the_gap_is_asked_for_again() -> None:
    index = PrefixIndex()
    assert not index.apply(A, stored(9, KEYS[8]))
    assert not index.replace(A, BlockList(5, KEYS[:4]))
    assert index.depths(KEYS) == {A: 4}
    assert not index.apply(A, stored(10, KEYS[9]))
    assert index.replace(A, BlockList(9, KEYS[:8]))
    assert index.depths(KEYS) == {A: 10}


def test_a_list_older_than_what_is_known_changes_nothing() -> None:
    index = PrefixIndex()
    assert index.apply(A, stored(1, *KEYS[:5]))
    assert index.replace(A, BlockList(3, KEYS[:2]))
    assert index.depths(KEYS) == {A: 5}


def test_a_number_alone_tells_that_a_worker_cached_something_before() -> None:
    index = PrefixIndex()
    assert not index.apply(A, BlockEvents(7, ()))
    assert index.replace(A, BlockList(7, KEYS[:3]))
    assert index.apply(A, BlockEvents(7, ()))
    assert index.depths(KEYS) == {A: 3}


def test_what_waits_for_a_list_is_bounded_and_then_another_list_is_wanted() -> None:
    index = PrefixIndex()
    many = block_keys(KeyScope("default", "g"), range(prefix_index.MAX_HELD_KEYS), 1)
    assert not index.apply(A, stored(5, *many))
    assert not index.apply(A, stored(5 + len(many), KEYS[0]))
    assert not index.replace(A, BlockList(5, ())), "the first of them were dropped"
    assert index.replace(A, BlockList(6 + len(many), KEYS[:1]))
    assert (len(index), index.depths(KEYS)) == (1, {A: 1})


def test_the_bit_of_a_worker_that_went_is_given_to_the_next() -> None:
    index = PrefixIndex()
    for life in range(1000):
        worker = WorkerId(f"w{life}")
        index.apply(worker, stored(1, KEYS[0]))
        index.apply(A, stored(life + 1, KEYS[life % 40]))
        assert index.depths(KEYS[:1]) == {worker: 1, A: 1}
        index.forget(worker)
    assert max(index._bits.values()) < 4


class Worker:
    """What a worker does: a set, and numbered events of which the last few can be told again."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.next = 1
        self.keys: set[BlockKey] = set()
        self.fetching: BlockList | None = None

    def events(self) -> BlockEvents:
        first, runs = self.next, []
        for _ in range(self.rng.randint(0, 3)):
            runs.append(self._run())
            self.next += len(runs[-1])
        return BlockEvents(first, tuple(runs))

    def _run(self) -> BlockRun:
        kind = self.rng.choices((STORED, EVICTED, CLEARED), (6, 5, 1))[0]
        if kind is STORED:
            keys = tuple(self.rng.sample(KEYS[:12], self.rng.randint(1, 4)))
            self.keys |= set(keys)
            return BlockRun(kind, keys)
        if kind is EVICTED and self.keys:
            keys = tuple(self.rng.sample(sorted(self.keys, key=lambda k: k.digest), 1))
            self.keys -= set(keys)
            return BlockRun(kind, keys)
        self.keys.clear()
        return BlockRun(CLEARED)

    def list(self) -> BlockList:
        return BlockList(self.next, tuple(self.keys))


def depth(keys: Sequence[BlockKey], held: set[BlockKey]) -> int:
    return next((at for at, key in enumerate(keys) if key not in held), len(keys))


def test_10000_random_sequences_of_events_gaps_and_lists_end_as_the_workers_are() -> None:
    for seed in range(10_000):
        rng, index = random.Random(seed), PrefixIndex()
        workers = {name: Worker(rng) for name in (A, B, C)}
        for _ in range(rng.randint(1, 12)):
            _one_thing(rng, index, workers)
        for name, worker in workers.items():
            if not index.apply(name, BlockEvents(worker.next, ())):
                assert index.replace(name, worker.list()), f"seed {seed}"
            assert index.num_keys(name) == len(worker.keys), f"seed {seed}"
        expected = {name: found for name, w in workers.items() if (found := depth(KEYS[:12], w.keys))}
        assert index.depths(KEYS[:12]) == expected, f"seed {seed}"
        assert len(index) == len(set().union(*(w.keys for w in workers.values()))), f"seed {seed}: leftovers"
        for name in workers:
            index.forget(name)
        assert (index._bits, index._holders) == ({}, {}), f"seed {seed}"


def _one_thing(rng: random.Random, index: PrefixIndex, workers: dict[WorkerId, Worker]) -> None:
    name = rng.choice((A, B, C))
    worker, dice = workers[name], rng.random()
    if dice < 0.6:
        events = worker.events()
        if rng.random() < 0.85:
            index.apply(name, events)
            if rng.random() < 0.1:
                index.apply(name, events)
    elif dice < 0.75:
        worker.fetching = worker.list()
    elif dice < 0.9 and worker.fetching is not None:
        index.replace(name, worker.fetching)
        worker.fetching = None
    elif dice > 0.95:
        index.forget(name)
        workers[name] = Worker(rng)
