"""The router's choices as a table."""

from __future__ import annotations

from coordinator.events import Placement
from coordinator.router import PASS_S, DecodeView, PrefillView, Snapshot, Want, next_to_place, route
from kvrelay.requests import WorkerId


def p(name: str, queued: int = 0, usable: bool = True, last: int = 0) -> PrefillView:
    return PrefillView(WorkerId(name), queued, queued, 512, usable, last)


def d(name: str, sequences: int = 0, free: int = 100, usable: bool = True, last: int = 0) -> DecodeView:
    return DecodeView(WorkerId(name), f"{name}:1", sequences, 8, free, 100, 16, usable, last)


def placed(prefill: str | None, decode: str | None) -> Placement:
    address = f"{decode}:1" if decode else ""
    return Placement(WorkerId(prefill) if prefill else None, WorkerId(decode) if decode else None, address)


def test_the_least_loaded_of_each_role_is_taken() -> None:
    snapshot = Snapshot((p("p0", 100), p("p1", 20)), (d("d0", 2), d("d1", 1)))
    assert route(snapshot, Want(50)) == placed("p1", "d1")


def test_equal_sequences_are_decided_by_free_blocks() -> None:
    assert route(Snapshot((p("p0"),), (d("d0", 1, 10), d("d1", 1, 20))), Want(50)) == placed("p0", "d1")


def test_ties_go_to_the_worker_assigned_longest_ago_then_to_the_smaller_id() -> None:
    assert route(Snapshot((p("p1"), p("p0")), (d("d1"), d("d0"))), Want(50)) == placed("p0", "d0")
    assert route(Snapshot((p("p0", last=2), p("p1", last=1)), (d("d0", last=2), d("d1", last=1))), Want(50)) == placed(
        "p1", "d1"
    )


def test_draining_or_stalled_workers_get_nothing() -> None:
    assert route(Snapshot((p("p0", usable=False),), (d("d0"),)), Want(5)) is None
    assert route(Snapshot((p("p0"),), (d("d0", usable=False),)), Want(5)) is None
    assert route(Snapshot((), ()), Want(5)) is None


def test_a_prefill_worker_holds_two_chunk_budgets_or_one_request_of_any_length() -> None:
    decode = (d("d0", free=1000),)
    assert route(Snapshot((p("p0", 512),), decode), Want(512)) == placed("p0", "d0")
    assert route(Snapshot((p("p0", 513),), decode), Want(512)) is None
    assert route(Snapshot((p("p0", 0),), decode), Want(8000)) == placed("p0", "d0")
    assert route(Snapshot((p("p0", 1),), decode), Want(8000)) is None


def test_decode_must_have_the_blocks_unless_it_is_empty() -> None:
    prefill = (p("p0"),)
    assert route(Snapshot(prefill, (d("d0", 1, 2),)), Want(31)) == placed("p0", "d0")
    assert route(Snapshot(prefill, (d("d0", 1, 2),)), Want(32)) is None
    assert route(Snapshot(prefill, (d("d0", 0, 2),)), Want(32)) == placed("p0", "d0")
    assert route(Snapshot(prefill, (d("d0", 8, 90),)), Want(32)) is None


def test_a_request_of_one_token_needs_no_decode_worker() -> None:
    assert route(Snapshot((p("p0"),), ()), Want(5, needs_decode=False)) == placed("p0", None)


def test_short_prompts_go_to_decode_alone_below_the_limit() -> None:
    snapshot = Snapshot((p("p0"),), (d("d0"),))
    assert route(snapshot, Want(9), local_prefill_below=10) == placed(None, "d0")
    assert route(snapshot, Want(10), local_prefill_below=10) == placed("p0", "d0")


def test_the_queue_is_first_come_first_served() -> None:
    snapshot = Snapshot((p("p0"),), (d("d0"),))
    assert next_to_place([Want(100), Want(5)], snapshot, 0.0) == (0, placed("p0", "d0"))
    assert next_to_place([], snapshot, 0.0) is None


def test_smaller_requests_pass_a_blocked_head_for_a_bounded_time() -> None:
    snapshot = Snapshot((p("p0", 1000),), (d("d0", 1, 100),))
    queue = [Want(500, blocked_since=10.0), Want(600), Want(24)]
    assert next_to_place(queue, snapshot, 10.0 + PASS_S - 0.1) == (2, placed("p0", "d0"))
    assert next_to_place(queue, snapshot, 10.0 + PASS_S) is None


def test_a_request_that_waits_to_be_tried_again_is_skipped_and_blocks_nobody() -> None:
    snapshot = Snapshot((p("p0"),), (d("d0"),))
    queue = [Want(5, not_before=11.0), Want(50)]
    assert next_to_place(queue, snapshot, 10.0) == (1, placed("p0", "d0"))
    assert next_to_place(queue, snapshot, 11.0) == (0, placed("p0", "d0"))


def test_a_pool_that_could_never_hold_a_request_is_passed_over_while_there_is_a_larger_one() -> None:
    small_p, large_p = PrefillView(WorkerId("p0"), total_blocks=4), PrefillView(WorkerId("p1"), 99, total_blocks=8)
    small_d, large_d = (DecodeView(WorkerId(n), f"{n}:1", s, 8, t, t) for n, s, t in (("d0", 0, 4), ("d1", 3, 8)))
    snapshot = Snapshot((small_p, large_p), (small_d, large_d))
    assert route(snapshot, Want(64, last_slots=64)) == placed("p0", "d0")
    assert route(snapshot, Want(64, last_slots=65)) == placed("p0", "d1")
    assert route(snapshot, Want(65, last_slots=80)) == placed("p1", "d1")
    assert route(Snapshot((small_p,), (small_d,)), Want(65, last_slots=80)) == placed("p0", "d0")
    full = DecodeView(WorkerId("d1"), "d1:1", 8, 8, 8, 8)
    assert route(Snapshot((small_p,), (small_d, full)), Want(20, last_slots=65)) is None
