"""What a worker tells of its cache: numbers, gaps, bounds, and which report it goes with."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from kvrelay.blocks import BlockEventKind, BlockEvents, BlockKey, BlockList, BlockRun
from kvrelay.requests import SessionId
from worker.cache_news import LATEST_S, MOST_KEYS, MOST_WAITING, CacheNews, cut

STORED, EVICTED, CLEARED = BlockEventKind.STORED, BlockEventKind.EVICTED, BlockEventKind.CLEARED
S1, S2 = SessionId("s1"), SessionId("s2")


def key(i: int) -> BlockKey:
    return BlockKey(i.to_bytes(32, "little"))


def run(kind: BlockEventKind, *numbers: int) -> BlockRun:
    return BlockRun(kind, tuple(map(key, numbers)))


@dataclass
class FakeCache:
    runs: list[BlockRun] = field(default_factory=list)
    cached: list[BlockKey] = field(default_factory=list)

    def do(self, *runs: BlockRun) -> None:
        for done in runs:
            self.runs.append(done)
            if done.kind is CLEARED:
                self.cached.clear()
            for one in done.keys:
                self.cached.append(one) if done.kind is STORED else self.cached.remove(one)

    def take_events(self) -> tuple[BlockRun, ...]:
        taken, self.runs = tuple(self.runs), []
        return taken

    def keys(self) -> tuple[BlockKey, ...]:
        return tuple(self.cached)


@pytest.fixture
def cache() -> FakeCache:
    return FakeCache()


@pytest.fixture
def news(cache: FakeCache) -> CacheNews:
    return CacheNews(cache)


def test_events_are_numbered_from_one_on_and_each_session_hears_all_of_them(cache: FakeCache, news: CacheNews) -> None:
    news.open(S1, 10.0)
    news.open(S2, 10.0)
    cache.do(run(STORED, 1, 2))
    news.look(10.0)
    assert news.take(S1) == (BlockEvents(1, (run(STORED, 1, 2),)),)
    cache.do(run(EVICTED, 1), run(CLEARED))
    news.look(10.1)
    assert news.take(S1) == (BlockEvents(3, (run(EVICTED, 1), run(CLEARED))),)
    assert news.take(S2) == (BlockEvents(1, (run(STORED, 1, 2), run(EVICTED, 1), run(CLEARED))),)
    assert news.take(S1) == news.take(S2) == ()


def test_a_session_that_opens_before_anything_happened_hears_of_no_gap(news: CacheNews) -> None:
    news.open(S1, 10.0)
    news.look(11.0)
    assert news.take(S1) == ()
    assert news.next_due() is None


def test_a_session_that_opens_late_hears_the_next_number_even_if_nothing_follows(
    cache: FakeCache, news: CacheNews
) -> None:
    cache.do(run(STORED, 1, 2, 3))
    news.look(10.0)
    news.open(S1, 10.0)
    assert news.next_due() == 10.0 + LATEST_S
    assert news.take(S1) == (BlockEvents(4, ()),)
    news.open(S2, 10.0)
    cache.do(run(STORED, 4))
    news.look(10.1)
    assert news.take(S2) == (BlockEvents(4, (run(STORED, 4),)),)


def test_news_waits_for_a_report_but_not_for_long(cache: FakeCache, news: CacheNews) -> None:
    news.open(S1, 10.0)
    cache.do(run(STORED, 1))
    news.look(10.0)
    cache.do(run(STORED, 2))
    news.look(10.2)
    assert news.next_due() == 10.0 + LATEST_S
    assert news.due(10.2) == []
    assert news.due(10.25) == [S1]
    news.take(S1)
    assert news.due(20.0) == []
    assert news.next_due() is None


def test_what_waits_too_long_is_dropped_and_makes_a_gap(cache: FakeCache, news: CacheNews) -> None:
    news.open(S1, 10.0)
    cache.do(run(STORED, *range(MOST_WAITING)))
    news.look(10.0)
    news.open(S2, 10.0)
    cache.do(run(STORED, MOST_WAITING))
    news.look(10.1)
    assert news.take(S1) == (BlockEvents(MOST_WAITING + 2, ()),)
    assert news.take(S2) == (BlockEvents(MOST_WAITING + 1, (run(STORED, MOST_WAITING),)),)
    cache.do(run(EVICTED, 5))
    news.look(10.2)
    assert news.take(S1) == (BlockEvents(MOST_WAITING + 2, (run(EVICTED, 5),)),)


def test_as_many_as_may_wait_are_told_in_values_of_bounded_size(cache: FakeCache, news: CacheNews) -> None:
    news.open(S1, 10.0)
    cache.do(run(STORED, *range(MOST_WAITING)))
    news.look(10.0)
    told = news.take(S1)
    assert [events.first for events in told] == list(range(1, MOST_WAITING, MOST_KEYS))
    assert told[-1].next == MOST_WAITING + 1
    assert [one for events in told for part in events.runs for one in part.keys] == cache.cached


def test_the_list_says_which_event_comes_after_it(cache: FakeCache, news: CacheNews) -> None:
    assert news.whole(10.0) == BlockList(1, ())
    news.open(S1, 10.0)
    cache.do(run(STORED, 1, 2), run(EVICTED, 1))
    assert news.whole(10.1) == BlockList(4, (key(2),))
    assert news.take(S1) == (BlockEvents(1, (run(STORED, 1, 2), run(EVICTED, 1))),)


def test_a_worker_that_caches_nothing_has_an_empty_list_and_no_news() -> None:
    news = CacheNews(None)
    news.open(S1, 10.0)
    news.look(10.0)
    assert news.take(S1) == ()
    assert news.whole(10.0) == BlockList(1, ())


def test_a_closed_session_is_forgotten(cache: FakeCache, news: CacheNews) -> None:
    news.open(S1, 10.0)
    cache.do(run(STORED, 1))
    news.look(10.0)
    news.close(S1)
    news.close(S1)
    assert (news.take(S1), news.due(99.0), news.next_due()) == ((), [], None)


def test_neighbours_of_one_kind_become_one_run() -> None:
    runs = [run(STORED, 1), run(STORED, 2, 3), run(CLEARED), run(CLEARED), run(EVICTED, 2), run(STORED, 4)]
    joined = (run(STORED, 1, 2, 3), run(CLEARED), run(CLEARED), run(EVICTED, 2), run(STORED, 4))
    assert cut(5, runs) == (BlockEvents(5, joined),)


def test_a_run_is_cut_where_a_value_is_full_and_a_clearing_after_it_opens_the_next() -> None:
    first = run(EVICTED, 0)
    long = run(STORED, *range(MOST_KEYS - 1))
    assert cut(1, [first, long, run(CLEARED), run(EVICTED, 7)]) == (
        BlockEvents(1, (first, long)),
        BlockEvents(MOST_KEYS + 1, (run(CLEARED), run(EVICTED, 7))),
    )
    longer = run(STORED, *range(2 * MOST_KEYS))
    told = cut(1, [first, longer])
    assert [(events.first, events.next) for events in told] == [
        (1, MOST_KEYS + 1),
        (MOST_KEYS + 1, 2 * MOST_KEYS + 1),
        (2 * MOST_KEYS + 1, 2 * MOST_KEYS + 2),
    ]
    assert sum((part.keys for events in told for part in events.runs), ()) == first.keys + longer.keys
