"""Prompts that decode computes itself: no ticket, no push, the same tokens; and what a drain does with them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.pair import Pair
from support.pair_requests import hash_reference, hash_references, make_work, work_of

from kvrelay.requests import RequestId
from worker.events import DrainAsked

B = 16


TOKENS = make_work("tokens", 200, 1).token_ids


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("num_tokens", [1, 16, 83, 300])
def test_decode_alone_gives_the_tokens_of_one_process(pair: Pair, num_tokens: int, n: int) -> None:
    work = replace(make_work("a", num_tokens, 20, seed=5), n=n)
    request = pair.submit(work, local=True)
    pair.run()
    assert [tuple(said) for said in request.said] == hash_references(work)
    assert (request.ticket, request.landed, request.pushed, pair.parts) == (None, False, None, [])
    assert sorted(request.endings) == [(s, "length") for s in range(n)]
    (record,) = request.records
    assert sum(tokens for *_, tokens in record.chunks) == num_tokens
    assert pair.counters(pair.decode)["local_prefills"] == 1
    assert pair.counters(pair.decode)["blocks_shared"] == (n - 1) * -(-num_tokens // B)


def test_max_tokens_1_computed_by_decode_ends_after_its_token(pair: Pair) -> None:
    request = pair.submit(make_work("a", 40, 1), local=True)
    pair.run()
    assert tuple(request.tokens) == hash_reference(request.work)
    assert request.endings == [(0, "length")]


def test_decode_computes_only_what_it_does_not_cache(pair: Pair) -> None:
    a = pair.submit(work_of("a", TOKENS[:60], 40))
    pair.run()
    b = pair.submit(work_of("b", (*TOKENS[:60], *a.tokens, 1, 2, 3)), local=True)
    pair.run()
    assert tuple(b.tokens) == hash_reference(b.work)
    assert b.num_cached_tokens == 6 * B
    assert [tokens for *_, tokens in b.records[0].chunks] == [103 - 96]


def test_prompts_computed_at_decode_stand_beside_those_that_are_pushed_there(pair: Pair) -> None:
    works = [replace(make_work(f"r{i}", 10 + 23 * i, 12, seed=i), n=1 + i % 2) for i in range(8)]
    requests = [pair.submit(work, local=i % 3 == 0) for i, work in enumerate(works)]
    pair.run()
    for request in requests:
        assert [tuple(said) for said in request.said] == hash_references(request.work)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("turns", range(10))
def test_an_abort_of_a_prompt_that_decode_computes_gives_all_back_in_any_phase(pair: Pair, turns: int, n: int) -> None:
    pair.submit(replace(make_work("a", 300, 20, seed=5), n=n), local=True)
    for _ in range(turns):
        pair.turn()
    pair.abort("a")
    pair.run()
    assert pair.d_pool.counts().held == 0


@pytest.mark.parametrize("n", [1, 3])
def test_a_decode_worker_that_drains_ends_prompts_it_has_begun_and_gives_the_others_back(pair: Pair, n: int) -> None:
    works = [replace(make_work(f"r{i}", 150, 20, seed=i), n=n) for i in range(4)]
    requests = [pair.submit(work, local=True) for work in works]
    while not pair.decode.load(pair.now).running:
        pair.turn()
    pair.decode.handle(DrainAsked(8.0), pair.now)
    pair.turn()
    given_back = [request for request in requests if request.ended]
    assert given_back == requests[1:]
    for request in given_back:
        assert request.endings == [(sequence, "failed") for sequence in range(n)]
    pair.run()
    assert [tuple(said) for said in requests[0].said] == hash_references(works[0])
    assert pair.counters(pair.decode)["given_back"] == 3
    late = pair.submit(replace(works[0], request_id=RequestId("late")), local=True)
    pair.run()
    assert late.refused is not None
    assert pair.d_pool.counts().held == 0


@pytest.mark.parametrize("n", [1, 3])
def test_at_the_end_of_the_grace_it_moves_the_prompt_it_computes_with_all_its_sequences(pair: Pair, n: int) -> None:
    request = pair.submit(replace(make_work("a", 2000, 20, seed=5), n=n), local=True)
    while not pair.decode.load(pair.now).running:
        pair.turn()
    pair.decode.handle(DrainAsked(1.0), pair.now)
    pair.turn()
    assert not request.ended
    pair.now += 0.5
    pair.turn()
    assert request.endings == [(sequence, "failed") for sequence in range(n)]
    assert pair.d_pool.counts().held == 0
