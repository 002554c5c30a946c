"""Several sequences of one prompt over the two cores: one push, each exact, each ends on its own."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from support.pair import Pair
from support.pair_requests import hash_references, make_work

from kvrelay.requests import StopRule

B = 16


@pytest.mark.parametrize("num_tokens", [5, 33, 96, 100])
def test_three_sequences_are_computed_and_moved_once_and_are_each_exact(pair: Pair, num_tokens: int) -> None:
    work = replace(make_work("a", num_tokens, 20, seed=5), n=3)
    request = pair.submit(work)
    pair.run()
    assert [tuple(said) for said in request.said] == hash_references(work)
    blocks = -(-num_tokens // B)
    assert request.pushed is not None
    assert request.pushed.num_blocks == blocks
    assert sum(pair.positions(), ()) == tuple(range(blocks))
    assert pair.counters(pair.decode)["blocks_shared"] == 2 * blocks
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
    assert pair.counters(pair.decode).get("blocks_shared", 0) == 0


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


def test_a_sequence_that_its_first_token_ends_holds_no_blocks_for_the_others_that_are_given_up(pair: Pair) -> None:
    """Prefill dies before it has opened the ticket, and nothing ever ends one that nobody opened but its attempt."""
    work = replace(make_work("a", 40, 20, seed=1), n=2)
    firsts = [reference[0] for reference in hash_references(work)]
    assert firsts[0] != firsts[1]
    pair.hold_links = True
    request = pair.submit(replace(work, stop=StopRule(20, frozenset({firsts[0]}))))
    while not request.started:
        pair.turn()
    pair.turn()
    assert pair.decode.load(pair.now).blocks.reserved == 3
    pair.lose_prefill()
    pair.abort_sequence("a", 1)
    pair.turn()
    assert pair.decode.load(pair.now).blocks.reserved == 0
    assert not list(pair.decode._desk.attempts)


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


def test_100_calls_of_three_sequences_half_of_them_cancelled_midway_leave_nothing(transport: str) -> None:
    pair, draw = Pair(transport=transport, prefill_blocks=24, decode_blocks=24, seed=9), random.Random(9)
    for number in range(100):
        work = replace(make_work(f"r{number}", 2 * B + 1, 20, seed=5), n=3)
        request = pair.submit(work)
        if number % 2:
            for _ in range(draw.randint(0, 24)):
                pair.turn()
            pair.abort(work.request_id)
        pair.run()
        references = hash_references(work)
        for said, reference in zip(request.said, references, strict=True):
            assert tuple(said) == (reference[: len(said)] if request.aborted else reference)
        for pool in (pair.p_pool, pair.d_pool):
            counts = pool.counts()
            assert (counts.held, counts.reserved, counts.quarantined) == (0, 0, 0)
    pair.close()
