"""The router's choices as a table: room, load, ties, the queue, decode alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import pytest

from coordinator.events import Placement
from coordinator.passing import LOOK_AHEAD, LOOKS_INTO_CACHES, PASS_S, next_to_place
from coordinator.router import Rules, route
from coordinator.views import DecodeView, PrefillView, Share, Snapshot, Want
from kvrelay.blocks import BlockKey
from kvrelay.config import ROUTERS
from kvrelay.requests import Priority, WorkerId


def p(name: str, queued: int = 0, usable: bool = True, last: int = 0) -> PrefillView:
    return PrefillView(WorkerId(name), queued, queued, 512, usable, last)


def d(name: str, sequences: int = 0, free: int = 100, usable: bool = True, last: int = 0) -> DecodeView:
    return DecodeView(WorkerId(name), f"{name}:1", sequences, 8, free, 100, 16, usable, last)


def placed(prefill: str | None, decode: str | None) -> Placement:
    address = f"{decode}:1" if decode else ""
    return Placement(WorkerId(prefill) if prefill else None, WorkerId(decode) if decode else None, address)


def place(snapshot: Snapshot, want: Want, rules: Rules = Rules()) -> Placement | None:  # noqa: B008  # frozen
    routed = route(snapshot, want, rules)
    return routed.placement if routed else None


def next_placed(
    queue: list[Want],
    snapshot: Snapshot,
    now: float,
    rules: Rules = Rules(),  # noqa: B008  # frozen
) -> tuple[int, Placement] | None:
    found = next_to_place(queue, snapshot, now, rules)
    return (found[0], found[1].placement) if found else None


@pytest.mark.parametrize("policy", ["cache_aware", "least_loaded"])
def test_the_least_loaded_of_each_role_is_taken(policy: str) -> None:
    snapshot = Snapshot((p("p0", 100), p("p1", 20)), (d("d0", 2), d("d1", 1)))
    assert place(snapshot, Want(50), Rules(policy)) == placed("p1", "d1")


@pytest.mark.parametrize("policy", ["cache_aware", "least_loaded"])
def test_equal_sequences_are_decided_by_free_blocks(policy: str) -> None:
    snapshot = Snapshot((p("p0"),), (d("d0", 1, 10), d("d1", 1, 20)))
    assert place(snapshot, Want(50), Rules(policy)) == placed("p0", "d1")


@pytest.mark.parametrize("policy", ["cache_aware", "least_loaded", "round_robin"])
def test_ties_go_to_the_worker_assigned_longest_ago_then_to_the_smaller_id(policy: str) -> None:
    rules = Rules(policy)
    assert place(Snapshot((p("p1"), p("p0")), (d("d1"), d("d0"))), Want(50), rules) == placed("p0", "d0")
    snapshot = Snapshot((p("p0", last=2), p("p1", last=1)), (d("d0", last=2), d("d1", last=1)))
    assert place(snapshot, Want(50), rules) == placed("p1", "d1")


def test_round_robin_looks_at_no_load() -> None:
    snapshot = Snapshot((p("p0", 100, last=1), p("p1", 0, last=2)), (d("d0", 7, last=1), d("d1", 0, last=2)))
    assert place(snapshot, Want(50), Rules("round_robin")) == placed("p0", "d0")


def test_random_depends_on_the_serial_alone_and_takes_each_worker_about_as_often() -> None:
    views = (p("p0", 100, last=1), p("p1"), p("p2")), (d("d0", 7), d("d1"), d("d2"))
    drawn = [place(Snapshot(*views, serial=n), Want(50), Rules("random")) for n in range(3000)]
    assert drawn == [place(Snapshot(*views, serial=n), Want(50), Rules("random")) for n in range(3000)]
    counts = [sum(x is not None and x.prefill == f"p{n}" for x in drawn) for n in range(3)]
    counts += [sum(x is not None and x.decode == f"d{n}" for x in drawn) for n in range(3)]
    assert all(900 < count < 1100 for count in counts), counts
    pairs = {(x.prefill, x.decode) for x in drawn if x is not None}
    assert len(pairs) == 9


@pytest.mark.parametrize("policy", ROUTERS)
def test_draining_stalled_and_full_workers_get_nothing(policy: str) -> None:
    rules = Rules(policy)
    assert place(Snapshot((p("p0", usable=False),), (d("d0"),)), Want(5), rules) is None
    assert place(Snapshot((p("p0"),), (d("d0", usable=False),)), Want(5), rules) is None
    assert place(Snapshot((), ()), Want(5), rules) is None
    views = (p("p0", usable=False), p("p1")), (d("d0", usable=False), d("d1", 8, 90), d("d2", 1, 2), d("d3"))
    for serial in range(20):
        assert place(Snapshot(*views, serial=serial), Want(32), rules) == placed("p1", "d3")


@pytest.mark.parametrize("policy", ROUTERS)
def test_a_worker_that_the_request_was_lost_with_is_taken_only_if_there_is_no_other(policy: str) -> None:
    want = Want(5, avoid=(WorkerId("p0"), WorkerId("d0")))
    for serial in range(20):
        both = Snapshot((p("p0"), p("p1", 400, last=9)), (d("d0"), d("d1", 5, last=9)), serial=serial)
        assert place(both, want, Rules(policy)) == placed("p1", "d1")
    assert place(Snapshot((p("p0"),), (d("d0"),)), want, Rules(policy)) == placed("p0", "d0")


def test_of_two_workers_to_avoid_one_that_is_gone_was_the_trouble() -> None:
    want = Want(5, avoid=(WorkerId("p0"), WorkerId("d0")))
    assert place(Snapshot((p("p0"), p("p1", 400)), (d("d1"),)), want) == placed("p0", "d1")
    assert place(Snapshot((p("p1"),), (d("d0"), d("d1", 5))), want) == placed("p1", "d0")


def test_a_prefill_worker_holds_two_chunk_budgets_or_one_request_of_any_length() -> None:
    decode = (d("d0", free=1000),)
    assert place(Snapshot((p("p0", 512),), decode), Want(512)) == placed("p0", "d0")
    assert place(Snapshot((p("p0", 513),), decode), Want(512)) is None
    assert place(Snapshot((p("p0", 0),), decode), Want(8000)) == placed("p0", "d0")
    assert place(Snapshot((p("p0", 1),), decode), Want(8000)) is None


def test_decode_must_have_the_blocks_unless_it_is_empty() -> None:
    prefill = (p("p0"),)
    assert place(Snapshot(prefill, (d("d0", 1, 2),)), Want(31)) == placed("p0", "d0")
    assert place(Snapshot(prefill, (d("d0", 1, 2),)), Want(32)) is None
    assert place(Snapshot(prefill, (d("d0", 0, 2),)), Want(32)) == placed("p0", "d0")
    assert place(Snapshot(prefill, (d("d0", 8, 90),)), Want(32)) == placed("p0", "d0")
    assert place(Snapshot(prefill, (d("d0", 8, 2),)), Want(32)) is None
    assert place(Snapshot(prefill, (d("d0", 10, 90),)), Want(32)) is None


@pytest.mark.parametrize(("rows", "most"), [(1, 2), (3, 4), (4, 5), (8, 10), (11, 13), (256, 320)])
def test_a_worker_without_a_free_row_gets_a_quarter_of_its_rows_more_and_at_least_one(rows: int, most: int) -> None:
    for taken, found in ((rows - 1, True), (rows, True), (most - 1, True), (most, False), (most + 1, False)):
        full = replace(d("d0", taken), max_sequences=rows)
        empty = taken == 0
        assert (place(Snapshot((p("p0"),), (full,)), Want(5)) == placed("p0", "d0")) is (found or empty)
        assert (place(Snapshot((), (full,)), Want(5)) == placed(None, "d0")) is (found or empty)


@pytest.mark.parametrize("policy", ROUTERS)
def test_nobody_goes_behind_others_where_a_row_is_free_elsewhere(policy: str) -> None:
    """Whatever else speaks against the worker that has it: load, an emptier pool, a cached prompt."""
    cached = Cached(WorkerId("d0"))
    for serial in range(20):
        busy = replace(d("d1", 15, 40, last=9), max_sequences=16)
        for prefill in ((p("p0"),), ()):
            snapshot = Snapshot(prefill, (d("d0", 8), busy), cached, serial)
            found = place(snapshot, Want(64, keys=(BlockKey(b"k"),)), Rules(policy))
            assert found is not None
            assert found.decode == "d1"


def test_without_a_free_row_one_is_taken_where_the_next_is_free_soonest() -> None:
    few, many = replace(d("d0", 2), max_sequences=2), replace(d("d1", 64, 30), max_sequences=64)
    assert place(Snapshot((p("p0"),), (few, many)), Want(5)) == placed("p0", "d1")
    even, behind = d("d0", 8, last=9), d("d1", 9)
    assert place(Snapshot((p("p0"),), (even, behind)), Want(5)) == placed("p0", "d0")


def test_a_free_row_without_the_blocks_keeps_nobody_from_a_worker_that_has_them() -> None:
    assert place(Snapshot((p("p0"),), (d("d0", 1, 2), d("d1", 8, 90))), Want(100)) == placed("p0", "d1")


def test_each_further_sequence_needs_a_place_and_a_block_of_its_own() -> None:
    prefill = (p("p0"),)
    assert place(Snapshot(prefill, (d("d0", 4, 5),)), Want(31, num_sequences=4)) == placed("p0", "d0")
    assert place(Snapshot(prefill, (d("d0", 4, 4),)), Want(31, num_sequences=4)) is None
    assert place(Snapshot(prefill, (d("d0", 6, 90),)), Want(31, num_sequences=4)) == placed("p0", "d0")
    assert place(Snapshot(prefill, (d("d0", 7, 90),)), Want(31, num_sequences=4)) is None
    for taken, found in (((4, 5), "d0"), ((5, 4), "d1"), ((5, 6), "d0"), ((6, 5), "d1")):
        workers = tuple(d(f"d{at}", sequences) for at, sequences in enumerate(taken))
        assert place(Snapshot(prefill, workers), Want(31, num_sequences=4)) == placed("p0", found)
    assert place(Snapshot(prefill, (d("d0", 0, 2),)), Want(31, num_sequences=99)) == placed("p0", "d0")


def test_a_request_of_one_token_needs_no_decode_worker() -> None:
    assert place(Snapshot((p("p0"),), ()), Want(5, needs_decode=False)) == placed("p0", None)


@pytest.mark.parametrize("policy", ROUTERS)
def test_short_prompts_go_to_decode_alone_below_the_limit(policy: str) -> None:
    snapshot, rules = Snapshot((p("p0"),), (d("d0"),)), Rules(policy, local_prefill_below=10)
    assert place(snapshot, Want(9), rules) == placed(None, "d0")
    assert place(snapshot, Want(10), rules) == placed("p0", "d0")
    assert place(snapshot, Want(9, needs_decode=False), rules) == placed("p0", None)


def test_a_short_prompt_goes_to_prefill_when_decode_has_no_free_row_and_waits_when_nobody_has_room() -> None:
    """Prefill computes it while it waits for a row; decode would begin with it then."""
    rules = Rules(local_prefill_below=10)
    assert place(Snapshot((p("p0"),), (d("d0", 7),)), Want(9), rules) == placed(None, "d0")
    assert place(Snapshot((p("p0"),), (d("d0", 8),)), Want(9), rules) == placed("p0", "d0")
    assert place(Snapshot((p("p0"),), (d("d0", 8), d("d1", 7))), Want(9), rules) == placed(None, "d1")
    assert place(Snapshot((p("p0", 1024),), (d("d0", 8),)), Want(9), rules) is None
    assert place(Snapshot((p("p0"),), (d("d0", 10),)), Want(9), rules) is None
    assert place(Snapshot((p("p0", 1024),), (d("d0"),)), Want(9), rules) == placed(None, "d0")
    assert place(Snapshot((p("p0", 1024),), (d("d0"),)), Want(10), rules) is None


@pytest.mark.parametrize("policy", ROUTERS)
def test_without_a_prefill_worker_decode_computes_every_prompt(policy: str) -> None:
    decode, rules = (d("d0"),), Rules(policy)
    assert place(Snapshot((), decode), Want(5000), rules) == placed(None, "d0")
    assert place(Snapshot((), decode), Want(5000, needs_decode=False), rules) == placed(None, "d0")
    assert place(Snapshot((), (d("d0", 10),)), Want(5000, needs_decode=False), rules) is None


def test_decode_computes_prompts_when_every_prefill_worker_leaves_but_not_when_one_is_silent() -> None:
    leaving = replace(p("p0", usable=False), leaving=True)
    silent = p("p1", usable=False)
    assert place(Snapshot((leaving,), (d("d0"),)), Want(500)) == placed(None, "d0")
    assert place(Snapshot((leaving,), (d("d0"),)), Want(500, needs_decode=False)) == placed(None, "d0")
    assert place(Snapshot((leaving, silent), (d("d0"),)), Want(500)) is None
    assert place(Snapshot((leaving, p("p1")), (d("d0"),)), Want(500)) == placed("p1", "d0")


def test_short_prompts_go_to_prefill_when_more_waits_at_decode() -> None:
    rules = Rules(local_prefill_below=256)
    for queued, local in ((312, True), (313, False), (600, False), (200_000, False)):
        decode = replace(d("d0", 1), queued_tokens=queued)
        found = place(Snapshot((p("p0", 100),), (decode,)), Want(200), rules)
        assert found == (placed(None, "d0") if local else placed("p0", "d0"))
    busy = replace(d("d0", 1), queued_tokens=600)
    assert place(Snapshot((p("p0", 600),), (busy,)), Want(200), rules) == placed(None, "d0")
    assert place(Snapshot((p("p0", 599),), (busy,)), Want(200), rules) == placed("p0", "d0")
    assert place(Snapshot((), (busy,)), Want(200), rules) == placed(None, "d0")


def test_a_prefill_worker_that_is_up_and_has_no_room_is_waited_for() -> None:
    for prefill in (p("p0", usable=False), p("p0", 1024)):
        assert place(Snapshot((prefill,), (d("d0"),)), Want(500)) is None
        assert place(Snapshot((prefill,), (d("d0"),)), Want(500, needs_decode=False)) is None


def test_what_decode_computes_itself_goes_where_the_fewest_prompt_tokens_wait() -> None:
    busy = DecodeView(WorkerId("d0"), "d0:1", 1, 8, 90, 100, queued_tokens=300)
    idle = DecodeView(WorkerId("d1"), "d1:1", 3, 8, 70, 100, queued_tokens=3)
    assert place(Snapshot((), (busy, idle)), Want(100)) == placed(None, "d1")
    assert place(Snapshot((), (busy, idle)), Want(100), Rules("least_loaded")) == placed(None, "d0")


def test_each_worker_gets_its_share() -> None:
    split = route(Snapshot((p("p0"),), (d("d0"),)), Want(100, num_sequences=3))
    assert split is not None
    assert split.share(WorkerId("p0")) == Share(100, 100, 3)
    assert split.share(WorkerId("d0")) == Share(100, 0, 3)
    alone = route(Snapshot((), (d("d0"),)), Want(100))
    assert alone is not None
    assert alone.share(WorkerId("d0")) == Share(100, 100, 1)


def test_the_queue_is_first_come_first_served() -> None:
    snapshot = Snapshot((p("p0"),), (d("d0"),))
    assert next_placed([Want(100), Want(5)], snapshot, 0.0) == (0, placed("p0", "d0"))
    assert next_placed([], snapshot, 0.0) is None


def test_smaller_requests_pass_a_blocked_head_for_a_bounded_time() -> None:
    snapshot = Snapshot((p("p0", 1000),), (d("d0", 1, 100),))
    queue = [Want(500, blocked_since=10.0), Want(600), Want(24)]
    assert next_placed(queue, snapshot, 10.0 + PASS_S - 0.1) == (2, placed("p0", "d0"))
    assert next_placed(queue, snapshot, 10.0 + PASS_S) is None


def test_past_a_head_that_waits_for_long_go_those_that_take_no_worker_of_the_role_it_waits_for() -> None:
    local, late = Rules(local_prefill_below=256), 10.0 + PASS_S
    busy, idle = Snapshot((p("p0", 9000),), (d("d0", 1),)), Snapshot((p("p0"),), (d("d0", 1, 1),))
    long, short, one = Want(1000, blocked_since=10.0), Want(50), Want(9000, needs_decode=False)
    assert next_placed([long, short], busy, late, local) == (1, placed(None, "d0"))
    assert next_placed([long, short], busy, late) is None
    assert next_placed([long, one, short], idle, late, local) == (1, placed("p0", None))
    assert next_placed([long, short], idle, late, local) is None
    full = Snapshot((p("p0", 9000),), (d("d0", 1, 1),))
    assert next_placed([long, one, short], full, late, local) is None
    assert next_placed([long, Want(300)], busy, late, local) is None


BATCH, INTERACTIVE = Priority.BATCH, Priority.INTERACTIVE


def test_past_a_blocked_head_a_lower_class_goes_only_if_it_takes_nothing_from_it() -> None:
    snapshot, local = Snapshot((p("p0", 1000),), (d("d0", 1, 100),)), Rules(local_prefill_below=256)
    head = Want(500, blocked_since=10.0, priority=INTERACTIVE)
    assert next_placed([head, Want(24, priority=BATCH), Want(24)], snapshot, 10.0) is None
    assert next_placed([head, Want(24), Want(23, priority=INTERACTIVE)], snapshot, 10.0) == (2, placed("p0", "d0"))
    assert next_placed([head, Want(24, priority=BATCH)], snapshot, 10.0, local) == (1, placed(None, "d0"))
    old = replace(head, priority=BATCH)
    assert next_placed([old, Want(24, priority=INTERACTIVE)], snapshot, 10.0) == (1, placed("p0", "d0"))
    assert next_placed([old, Want(24, priority=INTERACTIVE)], snapshot, 10.0 + PASS_S) is None


def test_a_head_that_is_not_blocked_keeps_nobody() -> None:
    queue = [Want(500, not_before=11.0, priority=INTERACTIVE), Want(24, priority=BATCH)]
    assert next_placed(queue, Snapshot((p("p0"),), (d("d0"),)), 10.0) == (1, placed("p0", "d0"))


def test_past_a_blocked_head_few_are_looked_for_in_caches() -> None:
    """A walk for each of those that wait, with every report of a worker, would stand in the way of all streams."""
    index = Counting()
    snapshot = Snapshot((p("p0", 1100),), (d("d0", 1),), index)
    keys = tuple(BlockKey(bytes([n])) for n in range(4))
    waiting = [Want(200 - i, keys=keys) for i in range(LOOK_AHEAD)]
    assert next_placed(waiting, snapshot, 0.0) is None
    assert index.asked == 1 + LOOKS_INTO_CACHES
    idle = Snapshot((p("p0", 1000),), (d("d0", 1),), index)
    assert next_placed([*waiting[:40], Want(5)], idle, 0.0) == (40, placed("p0", "d0"))


def test_many_sequences_of_a_short_prompt_are_no_small_request() -> None:
    snapshot = Snapshot((p("p0"),), (d("d0", 1, 10),))
    many = Want(5, num_sequences=10)
    assert next_placed([many, Want(6), Want(200)], snapshot, 0.0) == (1, placed("p0", "d0"))
    assert next_placed([Want(149), many], Snapshot((p("p0", 2000),), (d("d0"),)), 0.0) is None


def test_a_request_that_waits_to_be_tried_again_is_skipped_and_blocks_nobody() -> None:
    snapshot = Snapshot((p("p0"),), (d("d0"),))
    queue = [Want(5, not_before=11.0), Want(50)]
    assert next_placed(queue, snapshot, 10.0) == (1, placed("p0", "d0"))
    assert next_placed(queue, snapshot, 11.0) == (0, placed("p0", "d0"))


def test_a_pool_that_could_never_hold_a_request_is_passed_over_while_there_is_a_larger_one() -> None:
    small_p, large_p = PrefillView(WorkerId("p0"), total_blocks=4), PrefillView(WorkerId("p1"), 99, total_blocks=8)
    small_d, large_d = (DecodeView(WorkerId(n), f"{n}:1", s, 8, t, t) for n, s, t in (("d0", 0, 4), ("d1", 3, 8)))
    snapshot = Snapshot((small_p, large_p), (small_d, large_d))
    assert place(snapshot, Want(64, last_slots=64)) == placed("p0", "d0")
    assert place(snapshot, Want(64, last_slots=65)) == placed("p0", "d1")
    assert place(snapshot, Want(65, last_slots=80)) == placed("p1", "d1")
    assert place(Snapshot((small_p,), (small_d,)), Want(65, last_slots=80)) == placed("p0", "d0")
    full = DecodeView(WorkerId("d1"), "d1:1", 10, 8, 8, 8)
    assert place(Snapshot((small_p,), (small_d, full)), Want(20, last_slots=65)) is None


class Counting:
    """An index that finds nothing and counts how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0

    def depths(self, keys: Sequence[BlockKey]) -> Mapping[WorkerId, int]:
        self.asked += 1
        return {}


@dataclass(frozen=True)
class Cached:
    """An index in which one worker caches everything."""

    worker: WorkerId

    def depths(self, keys: Sequence[BlockKey]) -> Mapping[WorkerId, int]:
        return {self.worker: len(keys)}


def test_caches_are_looked_at_once_a_request_and_only_if_somebody_may_have_room() -> None:
    index, keys = Counting(), (BlockKey(b"k"),)
    for prefill, decode in ((p("p0", 1043), d("d0")), (p("p0"), d("d0", 10)), (p("p0"), d("d0", usable=False))):
        assert route(Snapshot((prefill,), (decode,), index), Want(20, keys=keys)) is None
    assert index.asked == 0
    assert route(Snapshot((p("p0"), p("p1")), (d("d0"), d("d1")), index), Want(20, keys=keys)) is not None
    assert index.asked == 1
    next_to_place([Want(20, keys=keys), Want(19, keys=keys)], Snapshot((p("p0", 1023),), (d("d0"),), index), 0.0)
    assert index.asked == 3
    for policy in ROUTERS[1:]:
        assert route(Snapshot((p("p0"),), (d("d0"),), index), Want(20, keys=keys), Rules(policy)) is not None
    assert index.asked == 3
