"""The two cores with cached blocks: only what decode lacks is moved, only what prefill lacks is computed."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from support.pair import Pair
from support.pair_requests import SESSION, hash_reference, make_work, work_of

from engine.plan import Plan, Result
from kvrelay.blocks import BlockCounts
from kvrelay.requests import RequestId, SequenceKey
from worker.compute_notes import ComputeNotes

B = 16


TOKENS = make_work("tokens", 200, 1).token_ids
OTHERS = make_work("others", 200, 1).token_ids


def test_only_blocks_that_decode_lacks_are_moved_and_only_tokens_that_prefill_lacks_are_computed(pair: Pair) -> None:
    pair.submit(work_of("a", TOKENS[:100]))
    pair.run()
    assert pair.positions() == [(0, 1, 2, 3), (4, 5, 6)]
    pair.parts.clear()
    b = pair.submit(work_of("b", TOKENS[:80] + OTHERS[:40]))
    pair.run()
    assert tuple(b.tokens) == hash_reference(b.work)
    assert b.ticket is not None
    assert b.ticket.num_cached_blocks == 5
    assert pair.positions() == [(5, 6, 7)]
    assert b.pushed is not None
    assert (b.pushed.num_blocks, b.num_cached_tokens) == (3, 80)
    assert [pair.counters(core)["matched_tokens"] for core in (pair.prefill, pair.decode)] == [80, 80]
    assert [tokens for *_, tokens in b.records[0].chunks] == [40]


def test_what_decode_generated_is_cached_there_and_not_at_prefill(pair: Pair) -> None:
    """60 + 40 tokens, of which the last one is never computed: 6 full blocks at decode, 3 at prefill."""
    a = pair.submit(work_of("a", TOKENS[:60], 40))
    pair.run()
    pair.parts.clear()
    b = pair.submit(work_of("b", (*TOKENS[:60], *a.tokens, 1, 2, 3)))
    pair.run()
    assert tuple(b.tokens) == hash_reference(b.work)
    assert b.ticket is not None
    assert (b.ticket.num_cached_blocks, b.num_cached_tokens) == (6, 3 * B)
    assert pair.positions() == [(6,)]


@pytest.mark.parametrize(("num_tokens", "moved", "computed"), [(96, [], 1), (100, [(6,)], 4)])
def test_a_prompt_that_decode_caches_whole_moves_no_full_block_and_still_works(
    pair: Pair, num_tokens: int, moved: list[tuple[int, ...]], computed: int
) -> None:
    for name in ("a", "b", "c"):
        pair.parts.clear()
        request = pair.submit(work_of(name, TOKENS[:num_tokens]))
        pair.run()
        assert tuple(request.tokens) == hash_reference(request.work)
        assert request.landed
    assert pair.positions() == moved
    assert request.ticket is not None
    assert request.ticket.num_cached_blocks == 6
    assert request.num_cached_tokens == num_tokens - computed
    assert request.pushed is not None
    assert request.pushed.num_blocks == len(moved)


def test_blocks_that_prefill_found_are_made_a_part_before_its_first_chunk_is_computed(pair: Pair) -> None:
    pair.submit(work_of("a", TOKENS[:130]))
    pair.run()
    pair.d_pool.clear_cache()
    pair.parts.clear()
    b = pair.submit(work_of("b", TOKENS[:130] + OTHERS[:70]))
    made_by_then: list[int] = []
    run = pair.p_exec.run

    def observed(plan: Plan) -> Result:
        made_by_then.extend(attempt.num_pushed for attempt in pair.prefill._desk.attempts)
        return run(plan)

    pair.p_exec.run = observed  # type: ignore[method-assign]  # the pair only calls it
    pair.run()
    assert tuple(b.tokens) == hash_reference(b.work)
    assert pair.positions() == [tuple(range(8)), (8, 9, 10, 11), (12,)]
    assert made_by_then == [8, 12]
    assert b.num_cached_tokens == 128


def test_cached_blocks_of_a_ticket_are_not_evicted_for_its_other_ones() -> None:
    pair = Pair(decode_blocks=8)
    pair.submit(work_of("a", TOKENS[:80], 2))
    pair.run()
    assert pair.d_pool.counts() == BlockCounts(total=8, free=3, cached=5)
    b = pair.submit(work_of("b", TOKENS[:80] + OTHERS[:40], 8))
    pair.run()
    assert b.ticket is not None
    assert b.ticket.table.block_ids[:5] == (0, 1, 2, 3, 4)
    assert tuple(b.tokens) == hash_reference(b.work)
    pair.close()


@pytest.mark.parametrize("ending", ["abort", "session"])
@pytest.mark.parametrize("turns", range(12))
def test_a_ticket_with_cached_blocks_that_ends_in_any_phase_gives_all_back(pair: Pair, turns: int, ending: str) -> None:
    pair.submit(work_of("a", TOKENS[:100]))
    pair.run()
    pair.submit(work_of("b", TOKENS[:80] + OTHERS))
    for _ in range(turns):
        pair.turn()
    if ending == "abort":
        pair.abort("b")
    else:
        pair.close_session()
    pair.run()
    assert pair.d_pool.counts().held == pair.p_pool.counts().held == 0


def test_300_requests_of_one_prefix_pin_nothing_on_either_side() -> None:
    pair = Pair(prefill_blocks=16, decode_blocks=16)
    for number in range(300):
        request = pair.submit(work_of(f"r{number}", (*TOKENS[: 3 * B], *OTHERS[number % 97 : number % 97 + 9]), 3))
        pair.run()
        for pool in (pair.p_pool, pair.d_pool):
            counts = pool.counts()
            assert (counts.held, counts.reserved, counts.quarantined) == (0, 0, 0)
        if number:
            assert request.ticket is not None
            assert (request.ticket.num_cached_blocks, request.num_cached_tokens) == (3, 3 * B)
        assert tuple(request.tokens) == hash_reference(request.work)
    pair.close()


def test_the_second_turn_of_200_chats_hits_what_the_first_left_and_prefill_keeps_no_attempt() -> None:
    pair, draw = Pair(prefill_blocks=40, decode_blocks=40), random.Random(13)
    for number in range(200):
        first = work_of(f"a{number}", tuple(draw.randrange(256) for _ in range(40)), 12)
        a = pair.submit(first)
        pair.run()
        b = pair.submit(work_of(f"b{number}", (*first.token_ids, *a.tokens, 1, 2, 3), 3))
        pair.run()
        assert tuple(b.tokens) == hash_reference(b.work)
        assert b.ticket is not None
        assert (b.num_cached_tokens, b.ticket.num_cached_blocks) == (2 * B, 3)
        assert len(pair.prefill._desk.attempts) == 0
    pair.close()


def test_a_request_without_the_cache_moves_and_computes_everything(pair: Pair) -> None:
    pair.submit(work_of("a", TOKENS[:100]))
    pair.run()
    pair.parts.clear()
    b = pair.submit(replace(work_of("b", TOKENS[:100]), prefix_cache=False))
    pair.run()
    assert tuple(b.tokens) == hash_reference(b.work)
    assert b.ticket is not None
    assert (b.ticket.num_cached_blocks, b.num_cached_tokens) == (0, 0)
    assert sum(pair.positions(), ()) == tuple(range(7))


def test_other_tenants_and_salts_find_nothing_on_either_side(pair: Pair) -> None:
    pair.submit(replace(work_of("a", TOKENS[:100]), tenant="org_1", cache_salt="2345"))
    pair.run()
    for name, tenant, salt in (("b", "org_12345", ""), ("c", "default", "2345"), ("d", "org_1", "")):
        request = pair.submit(replace(work_of(name, TOKENS[:100]), tenant=tenant, cache_salt=salt))
        pair.run()
        assert request.ticket is not None
        assert (request.ticket.num_cached_blocks, request.num_cached_tokens) == (0, 0)


def test_what_a_prompt_found_is_told_once_and_not_what_it_found_when_it_came_back() -> None:
    key = make_key()
    notes = ComputeNotes(received_at=1.0)
    notes.chunk(2.0, 3.0, 5)
    notes.matched(32)
    notes.chunk(3.0, 4.0, 5)
    notes.matched(64)
    assert notes.record(key).num_cached_tokens == 32
    missed = ComputeNotes(received_at=1.0)
    missed.chunk(2.0, 3.0, 5)
    missed.chunk(3.0, 4.0, 5)
    missed.matched(64)
    assert missed.record(key).num_cached_tokens == 0


@pytest.mark.parametrize("seed", range(40))
def test_any_mix_of_prefixes_forks_local_prompts_and_aborts_on_small_pools_is_exact(seed: int) -> None:
    draw = random.Random(f"mix {seed}")
    transport = draw.choice(["nixl", "grpc"])
    blocks = draw.randint(14, 40)
    pair = Pair(transport=transport, prefill_blocks=blocks, decode_blocks=blocks, step_tokens=32, seed=seed)
    requests = []
    for number in range(14):
        begin = draw.choice((TOKENS, OTHERS))[: draw.randint(0, 90)]
        own = tuple(draw.randrange(256) for _ in range(draw.randint(1, 40)))
        work = replace(work_of(f"r{number}", begin + own, draw.randint(2, 40)), n=draw.choice([1, 1, 2, 3]))
        work = replace(
            work, prefix_cache=draw.random() < 0.9, sampling=replace(work.sampling, temperature=1.0, seed=number)
        )
        requests.append(pair.submit(work, local=draw.random() < 0.3))
        for _ in range(draw.randint(0, 8)):
            pair.turn()
        if draw.random() < 0.2:
            victim = draw.choice(requests)
            if victim.work.n > 1 and all(victim.said) and not victim.aborted:
                pair.abort_sequence(victim.work.request_id, draw.randrange(victim.work.n))
            else:
                pair.abort(victim.work.request_id)
    pair.run(8000)
    for request in requests:
        for sequence, said in enumerate(request.said):
            expected = hash_reference(request.work, sequence)
            partly = request.aborted or sequence in request.dropped
            assert tuple(said) == (expected[: len(said)] if partly else expected)
    for pool in (pair.p_pool, pair.d_pool):
        assert pool.counts().held == 0
    pair.close()


def make_key() -> SequenceKey:
    return SequenceKey(SESSION, RequestId("a"), 1)
