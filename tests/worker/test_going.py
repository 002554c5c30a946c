"""A worker that is told to go: what it gives back at once, what it ends, what it moves, and when it may close."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from support.pair import Pair
from support.pair_requests import SESSION, hash_reference, make_work

from kvrelay.blocks import BlockCounts
from kvrelay.requests import SessionId
from kvrelay.session import Drain, Load
from worker.drain import SETTLE_S, DrainTimes, Leaving
from worker.events import CommandReceived, DrainAsked, Leave, SendReport, SessionOpened

IDLE = Load(BlockCounts(8, 8), draining=True)


@pytest.fixture(params=["nixl", "grpc"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = Pair(transport=str(request.param), step_tokens=64)
    yield made
    made.close()


# the times


def test_the_rest_is_moved_two_seconds_before_the_end_and_a_short_grace_is_shared_out() -> None:
    assert DrainTimes.of(8.0, 100.0) == DrainTimes(106.0, 107.25, 108.0)
    assert DrainTimes.of(1.0, 100.0) == DrainTimes(100.5, 100.75, 101.0)
    assert DrainTimes.of(0.0, 100.0) == DrainTimes(100.0, 100.0, 100.0)


def test_told_twice_the_sooner_end_counts() -> None:
    long, short = DrainTimes.of(30.0, 0.0), DrainTimes.of(8.0, 1.0)
    assert short.sooner(long) == long.sooner(short) == short
    assert long.sooner(None) == long


def test_it_closes_once_nothing_came_for_a_moment() -> None:
    wait, done = Leaving(DrainTimes.of(8.0, 0.0), 0.0).look(IDLE, 1, 0.1)
    assert not done
    wait, done = wait.look(replace(IDLE, waiting=1), 1, 0.15)
    wait, done = wait.look(IDLE, 1, 0.3)
    assert not done
    wait, done = wait.look(IDLE, 1, 0.151 + SETTLE_S)
    assert done


def test_a_load_from_before_the_engine_heard_of_it_is_no_reason_to_close() -> None:
    """A step that computes the first chunk of a prompt began with a load that knew nothing of it."""
    before, wait = replace(IDLE, draining=False), Leaving(DrainTimes.of(8.0, 0.0), 0.0)
    for at in (0.1, 0.5, 2.0):
        assert not wait.look(before, 0, at)[1]
        wait, done = wait.look(before, 1, at)
        assert not done
    wait, done = wait.look(IDLE, 1, 2.1)
    assert not done
    assert wait.look(IDLE, 1, 2.001 + SETTLE_S)[1]
    assert wait.look(before, 0, 7.25)[1]


def test_it_closes_near_the_end_whatever_is_left() -> None:
    busy = replace(IDLE, running=3, transfers_in_flight=2)
    wait, done = Leaving(DrainTimes.of(8.0, 0.0), 0.0).look(busy, 1, 7.2)
    assert not done
    assert wait.look(busy, 1, 7.25)[1]


def test_without_a_session_only_writes_are_waited_for() -> None:
    wait = Leaving(DrainTimes.of(8.0, 0.0), 0.0)
    assert wait.look(replace(IDLE, waiting=1), 0, 0.01)[1]
    assert not wait.look(replace(IDLE, transfers_in_flight=1), 0, 0.01)[1]


# prefill


def test_a_prefill_worker_gives_back_what_it_has_not_begun_and_hands_over_the_rest(pair: Pair) -> None:
    requests = [pair.submit(make_work(f"r{i}", 150, 5)) for i in range(6)]
    while not pair.prefill.load(pair.now).running:
        pair.turn()
    pair.turn()
    pair.prefill.handle(DrainAsked(8.0), pair.now)
    pair.turn()
    given_back = [r for r in requests if r.ended]
    assert 0 < len(given_back) < 6
    assert {(r.ended.reason, r.ended.code) for r in given_back if r.ended} == {("failed", "Unavailable")}
    assert not any(r.tokens for r in given_back)
    pair.run()
    kept = [r for r in requests if r not in given_back]
    assert [tuple(r.tokens) for r in kept] == [hash_reference(r.work) for r in kept]
    assert dict(pair.prefill.load(pair.now).counters)["given_back"] == len(given_back)


def test_at_the_end_of_the_grace_a_prefill_worker_moves_prompts_and_ends_hand_offs(pair: Pair) -> None:
    short, long = make_work("short", 60, 3), make_work("long", 1500, 3)
    pair.hold_links = True
    requests = [pair.submit(work) for work in (short, long)]
    while not requests[0].tokens:
        pair.turn()
    pair.prefill.handle(DrainAsked(0.1), pair.now)
    pair.now += 0.06
    pair.turn()
    assert requests[1].ended is not None
    assert (requests[1].ended.code, requests[1].tokens) == ("Unavailable", [])
    assert requests[0].ended is None
    pair.abort("long")  # as the coordinator does with what it starts anew
    pair.hold_links = False
    pair.run()
    assert tuple(requests[0].tokens) == hash_reference(short)


def test_a_worker_that_drains_takes_nothing_new_and_says_so(pair: Pair) -> None:
    pair.turn()
    pair.decode.handle(CommandReceived(SESSION, Drain(8.0)), pair.now)
    pair.prefill.handle(DrainAsked(8.0), pair.now)
    pair.turn()
    reserved, computed = pair.submit(make_work("a", 20, 5)), pair.submit(make_work("b", 20, 1))
    pair.turn()
    for request in (reserved, computed):
        assert request.refused is not None
        assert (request.refused.code, request.refused.message) == ("Unavailable", "the worker is draining")


def test_every_session_hears_of_the_drain_at_once_and_the_process_is_told_to_leave(pair: Pair) -> None:
    other = SessionId("s-2")
    pair.decode.handle(SessionOpened(SESSION, "c"), pair.now)
    pair.decode.handle(SessionOpened(other, "c2"), pair.now)
    pair.decode.handle(CommandReceived(SESSION, Drain(8.0)), pair.now)
    actions = pair.decode.actions(pair.now)
    assert [a.grace_s for a in actions if isinstance(a, Leave)] == [8.0]
    told = {a.session: a.report.load for a in actions if isinstance(a, SendReport)}
    assert {session: load is not None and load.draining for session, load in told.items()} == {
        SESSION: True,
        other: True,
    }


# decode


def test_a_decode_worker_gives_back_reserves_without_a_ticket_and_ends_the_others(pair: Pair) -> None:
    """Tickets may hold half the pool of 256 blocks: 64 each, so two have one."""
    requests = [pair.submit(make_work(f"r{i}", 1000, 5)) for i in range(4)]
    pair.turn()
    pair.turn()
    assert pair.decode.load(pair.now).blocks.reserved == 126
    pair.decode.handle(DrainAsked(1e6), pair.now)
    pair.turn()
    given_back = [r for r in requests if r.ended]
    assert [r.work.request_id for r in given_back] == ["r2", "r3"]
    assert all(r.ended and r.ended.message == "draining" for r in given_back)
    pair.run()
    assert [tuple(r.tokens) for r in requests[:2]] == [hash_reference(r.work) for r in requests[:2]]


def test_at_the_end_of_the_grace_a_decode_worker_moves_what_runs_and_what_lands(pair: Pair) -> None:
    running = pair.submit(make_work("run", 40, 500))
    while len(running.tokens) < 10:
        pair.turn()
    landing = pair.submit(make_work("land", 2000, 500))
    while not pair.prefill.load(pair.now).running:
        pair.turn()
    pair.decode.handle(DrainAsked(1.0), pair.now)
    due = pair.decode.next_wake()
    assert due is not None
    assert due <= pair.now + 0.5
    pair.now += 0.5
    pair.turn()
    for request in (running, landing):
        assert request.ended is not None
        assert (request.ended.code, request.ended.message) == ("Unavailable", "draining: moved")
    assert tuple(running.tokens) == hash_reference(running.work)[: len(running.tokens)]
    pair.run()
    assert dict(pair.decode.load(pair.now).counters)["moved"] == 2


# stuck or not


def test_a_core_is_stuck_only_while_it_has_work_and_nothing_moves(pair: Pair) -> None:
    assert pair.decode.stuck_s(0.0) == 0.0
    request = pair.submit(make_work("a", 20, 50))
    while not pair.decode.load(pair.now).running:
        pair.turn()
    at = pair.now
    assert pair.decode.stuck_s(at) < 0.1
    for quarter in range(1, 41):
        stuck_s = pair.decode.stuck_s(at + quarter / 4)
    assert stuck_s == pytest.approx(10.0, abs=0.1)
    assert pair.decode.stuck_s(at + 30.0) == 0.0, "a pause of the whole process is not its fault"
    pair.now = at + 30.0
    pair.turn()
    assert pair.decode.stuck_s(pair.now) < 0.1
    pair.run()
    assert tuple(request.tokens) == hash_reference(request.work)
    assert pair.decode.stuck_s(pair.now) == pair.prefill.stuck_s(pair.now) == 0.0
