"""Tickets that prefill should not be given, stale pushes, cancelled queues: wrong for nobody, nothing lost."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from support.pair import D, Pair
from support.pair_requests import SESSION, hash_reference, make_work, work_of

from kvrelay.blocks import Ticket
from kvrelay.link import LEASE_S
from kvrelay.requests import Incarnation, RequestId, WorkerId
from kvrelay.session import Abort, Destination, Prefill
from kvtransfer.manifest import MAX_POSITIONS, Manifest, encode
from prefill_svc import core as prefill_core
from worker.events import CommandReceived

TOKENS = make_work("tokens", 200, 1).token_ids


def hand(pair: Pair, name: str, ticket: Ticket) -> None:
    """A coordinator that has lost its way gives this ticket to another request's prefill."""
    request = pair.submit(make_work(name, 40, 1))
    request.work = replace(request.work, stop=replace(request.work.stop, max_tokens=8))
    pair.to_prefill["session"].pop()
    destination = Destination(WorkerId("d"), "x", ticket)
    pair.prefill.handle(CommandReceived(SESSION, Prefill(request.work, destination)), pair.now)


def test_a_ticket_that_is_in_use_is_refused_to_a_second_request_and_harms_neither(pair: Pair) -> None:
    first = pair.submit(make_work("a", 300, 20))
    while first.ticket is None:
        pair.turn()
    pair.turn()
    hand(pair, "b", first.ticket)
    pair.run()
    refused = pair.requests[RequestId("b")].refused
    assert refused is not None
    assert (refused.code, refused.field) == ("InvalidArgument", "destination.ticket")
    assert tuple(first.tokens) == hash_reference(first.work)


@pytest.mark.parametrize("odd", ["used", "unknown", "of another request"])
def test_a_ticket_that_decode_does_not_know_or_gave_to_another_fails_and_harms_nobody(pair: Pair, odd: str) -> None:
    first = pair.submit(make_work("a", 300, 20))
    if odd == "used":
        pair.run()
    else:
        pair.hold_links = True
        while first.ticket is None:
            pair.turn()
    assert first.ticket is not None
    ticket = replace(first.ticket, epoch=99) if odd == "unknown" else first.ticket
    if odd == "of another request":
        pair.to_prefill["session"].clear()
    hand(pair, "b", ticket)
    pair.hold_links = False
    second = pair.requests[RequestId("b")]
    for _ in range(20):
        pair.turn()
    assert second.ended is not None
    assert (second.ended.reason, second.ended.code) == ("failed", "Unavailable")
    assert pair.counters(pair.decode)["refused_stale"] >= 1
    if odd == "of another request":
        destination = Destination(WorkerId("d"), "x", first.ticket)
        pair.prefill.handle(CommandReceived(SESSION, Prefill(first.work, destination)), pair.now)
    pair.run()
    assert tuple(first.tokens) == hash_reference(first.work)


def test_blocks_that_decode_gives_up_alone_are_let_go_of_by_prefill_at_once(pair: Pair) -> None:
    """Nobody but decode ends it: its own word, over the link, frees the sources long before any lease is over."""
    for turns in range(3, 9):
        request = pair.submit(make_work(f"r{turns}", 300, 20))
        while request.ticket is None:
            pair.turn()
        for _ in range(turns):
            pair.turn()
        request.aborted = True
        pair._command(pair.to_decode, Abort(request.work.request_id, 1))
        for _ in range(6):
            pair.turn()
        assert pair.is_quiet(), pair.prefill.load(pair.now)


def test_a_stale_push_never_reaches_the_next_owner_of_its_blocks(transport: str) -> None:
    """Decode has room for one. With nixl blocks rest until the fence, with grpc frames come late and are refused."""
    pair = Pair(transport=transport, decode_blocks=12)
    for number in range(20):
        old = pair.submit(make_work(f"old{number}", 150, 20))
        while old.ticket is None:
            pair.turn()
        for _ in range(number % 5):
            pair.turn()
        pair.hold_links = True
        pair.turn()
        pair.turn()
        old.aborted = True
        pair._command(pair.to_decode, Abort(old.work.request_id, 1))
        new = pair.submit(make_work(f"new{number}", 150, 20))
        for _ in range(3):
            pair.turn()
        pair.hold_links = False
        pair.run()
        assert tuple(new.tokens) == hash_reference(new.work)
    assert pair.counters(pair.decode)["refused_stale" if transport == "grpc" else "quarantined"] > 0
    pair.close()


@pytest.mark.parametrize("seed", range(6))
def test_fifty_that_wait_for_a_full_decode_worker_are_cancelled_in_any_order(transport: str, seed: int) -> None:
    pair = Pair(transport=transport, decode_blocks=16, seed=seed)
    runs = pair.submit(make_work("runs", 30, 200))
    while len(runs.tokens) < 3:
        pair.turn()
    waiting = [pair.submit(make_work(f"w{i}", 100, 20)) for i in range(50)]
    pair.turn()
    pair.turn()
    assert pair.decode.load(pair.now).waiting >= 49
    random.Random(seed).shuffle(waiting)
    for request in waiting:
        pair.abort(request.work.request_id)
        if seed % 2:
            pair.turn()
    for _ in range(4):
        pair.turn()
    assert pair.decode.load(pair.now).waiting == 0
    pair.run()
    assert tuple(runs.tokens) == hash_reference(runs.work)
    pair.close()


def test_tickets_that_are_open_and_rows_that_are_waited_for_much_longer_than_a_lease_lose_nothing(
    transport: str,
) -> None:
    """Two rows, turns of half a second: the last prompt is computed after a minute and runs after two."""
    pair = Pair(transport=transport, prefill_blocks=1024, decode_blocks=1024, decode_rows=2)
    begun_at = pair.now
    requests = [pair.submit(make_work(f"r{i}", 200, 12)) for i in range(40)]
    longest = 0.0
    while not all(r.is_done for r in requests):
        pair.turn()
        pair.now += 0.5
        longest = pair.now - begun_at if pair.writer.in_flight else longest
        assert pair.now < begun_at + 600
    assert longest > 3 * LEASE_S
    pair.run()
    assert [tuple(r.tokens) for r in requests] == [hash_reference(r.work) for r in requests]
    counters = pair.counters(pair.decode)
    assert [counters.get(name, 0) for name in ("lease_expired", "quarantined", "late_tick")] == [0, 0, 0]
    pair.close()


def test_blocks_found_in_the_cache_go_out_in_parts_of_bounded_size(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.submit(work_of("a", TOKENS[:130]))
    pair.run()
    pair.d_pool.clear_cache()
    pair.parts.clear()
    monkeypatch.setattr(prefill_core, "MOST_A_PART", 3)
    again = pair.submit(work_of("b", TOKENS[:130]))
    pair.run()
    assert pair.positions() == [(0, 1, 2), (3, 4, 5), (6, 7), (8,)]
    assert tuple(again.tokens) == hash_reference(again.work)


def test_the_manifest_of_the_largest_part_fits_a_message_of_a_link() -> None:
    assert prefill_core.MOST_A_PART <= MAX_POSITIONS
    largest = ((1 << 31) - 1,) * prefill_core.MOST_A_PART
    sums = ((1 << 32) - 1,) * prefill_core.MOST_A_PART
    manifest = Manifest(1 << 62, D, Incarnation("p" * 16), 1 << 20, largest, largest, True, sums)
    assert len(encode(manifest)) < 256 * 1024
