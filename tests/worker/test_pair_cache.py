"""The two cores with cached blocks: only what decode lacks is moved, only what prefill lacks is computed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from support.pair import SESSION, Pair, hash_reference, hash_references, make_work

from engine.plan import Plan, Result
from kvrelay.blocks import BlockCounts
from kvrelay.requests import RequestId, SequenceKey, StopRule
from kvrelay.session import Work
from worker.compute_notes import ComputeNotes
from worker.events import DrainAsked

B = 16


@pytest.fixture(params=["nixl", "grpc"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = Pair(transport=str(request.param))
    yield made
    made.close()


def work_of(name: str, tokens: tuple[int, ...], max_tokens: int = 20) -> Work:
    return replace(make_work(name, 1, max_tokens), token_ids=tokens, num_prompt_tokens=len(tokens))


TOKENS = make_work("tokens", 200, 1).token_ids
OTHERS = make_work("others", 200, 1).token_ids


def positions(pair: Pair) -> list[tuple[int, ...]]:
    return [part.positions for part in pair.parts]


def counters(pair: Pair, role: str) -> dict[str, int]:
    core = pair.prefill if role == "prefill" else pair.decode
    return dict(core.load(pair.now).counters)


def test_only_blocks_that_decode_lacks_are_moved_and_only_tokens_that_prefill_lacks_are_computed(pair: Pair) -> None:
    pair.submit(work_of("a", TOKENS[:100]))
    pair.run()
    assert positions(pair) == [(0, 1, 2, 3), (4, 5, 6)]
    pair.parts.clear()
    b = pair.submit(work_of("b", TOKENS[:80] + OTHERS[:40]))
    pair.run()
    assert tuple(b.tokens) == hash_reference(b.work)
    assert b.ticket is not None
    assert b.ticket.num_cached_blocks == 5
    assert positions(pair) == [(5, 6, 7)]
    assert b.pushed is not None
    assert (b.pushed.num_blocks, b.num_cached_tokens) == (3, 80)
    assert [counters(pair, role)["matched_tokens"] for role in ("prefill", "decode")] == [80, 80]
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
    assert positions(pair) == [(6,)]


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
    assert positions(pair) == moved
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
    assert positions(pair) == [tuple(range(8)), (8, 9, 10, 11), (12,)]
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


def test_a_request_without_the_cache_moves_and_computes_everything(pair: Pair) -> None:
    pair.submit(work_of("a", TOKENS[:100]))
    pair.run()
    pair.parts.clear()
    b = pair.submit(replace(work_of("b", TOKENS[:100]), prefix_cache=False))
    pair.run()
    assert tuple(b.tokens) == hash_reference(b.work)
    assert b.ticket is not None
    assert (b.ticket.num_cached_blocks, b.num_cached_tokens) == (0, 0)
    assert sum(positions(pair), ()) == tuple(range(7))


def test_other_tenants_and_salts_find_nothing_on_either_side(pair: Pair) -> None:
    pair.submit(replace(work_of("a", TOKENS[:100]), tenant="org_1", cache_salt="2345"))
    pair.run()
    for name, tenant, salt in (("b", "org_12345", ""), ("c", "default", "2345"), ("d", "org_1", "")):
        request = pair.submit(replace(work_of(name, TOKENS[:100]), tenant=tenant, cache_salt=salt))
        pair.run()
        assert request.ticket is not None
        assert (request.ticket.num_cached_blocks, request.num_cached_tokens) == (0, 0)


# several sequences


@pytest.mark.parametrize("num_tokens", [5, 33, 96, 100])
def test_three_sequences_are_computed_and_moved_once_and_are_each_exact(pair: Pair, num_tokens: int) -> None:
    work = replace(make_work("a", num_tokens, 20, seed=5), n=3)
    request = pair.submit(work)
    pair.run()
    assert [tuple(said) for said in request.said] == hash_references(work)
    blocks = -(-num_tokens // B)
    assert request.pushed is not None
    assert request.pushed.num_blocks == blocks
    assert sum(positions(pair), ()) == tuple(range(blocks))
    assert counters(pair, "decode")["blocks_shared"] == 2 * blocks
    assert len(request.records) == 1
    assert sorted(request.endings) == [(0, "length"), (0, "length"), (1, "length"), (2, "length")]


def test_four_sequences_of_1_000_tokens_hold_less_than_1_1_times_its_blocks_and_their_outputs(pair: Pair) -> None:
    request = pair.submit(replace(make_work("a", 1_000, 20, seed=5), n=4))
    most = 0
    while not request.ended:
        pair.turn()
        most = max(most, pair.d_pool.counts().held)
    pair.run()
    assert [tuple(said) for said in request.said] == hash_references(request.work)
    assert request.pushed is not None
    assert request.pushed.num_blocks == 63
    assert most == 63 + 3 + 4, "three copies of the last block, and one of its own for each one's 11 last tokens"


def test_sequences_whose_first_token_ends_them_do_not_run(pair: Pair) -> None:
    work = replace(make_work("a", 40, 20, seed=5), n=3)
    firsts = [reference[0] for reference in hash_references(work)]
    assert len(set(firsts)) == 3
    stopping = replace(work, stop=StopRule(20, frozenset({firsts[0], firsts[2]})))
    request = pair.submit(stopping)
    pair.run()
    assert [tuple(said) for said in request.said] == hash_references(stopping)
    assert [len(said) for said in request.said][::2] == [1, 1]
    assert counters(pair, "decode").get("blocks_shared", 0) == 0


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("turns", range(1, 16, 2))
@pytest.mark.parametrize("sequence", [0, 1, 2])
def test_a_sequence_that_is_given_up_at_any_moment_harms_no_other(
    pair: Pair, sequence: int, turns: int, local: bool
) -> None:
    """One that had no token yet is never heard of; a coordinator gives single ones up only after that."""
    work = replace(make_work("a", 90, 9, seed=5), n=3)
    request = pair.submit(work, local=local)
    while not request.said[0]:
        pair.turn()
    for _ in range(turns):
        pair.turn()
    pair.abort_sequence("a", sequence)
    pair.run()
    references = hash_references(work)
    for other in {0, 1, 2} - {sequence}:
        assert tuple(request.said[other]) == references[other]
    said = tuple(request.said[sequence])
    assert said == references[sequence][: len(said)]


@pytest.mark.parametrize("local", [False, True])
def test_with_its_last_sequence_an_attempt_is_over(pair: Pair, local: bool) -> None:
    request = pair.submit(replace(make_work("a", 40, 500, seed=5), n=2), local=local)
    while len(request.tokens) < 3:
        pair.turn()
    for sequence in (0, 1):
        pair.abort_sequence("a", sequence)
    pair.run()
    assert pair.decode.load(pair.now).running == 0
    assert pair.d_pool.counts().held == 0


# prompts that decode computes


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
    assert counters(pair, "decode")["local_prefills"] == 1
    assert counters(pair, "decode")["blocks_shared"] == (n - 1) * -(-num_tokens // B)


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
    assert counters(pair, "decode")["given_back"] == 3
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


# everything at once


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
