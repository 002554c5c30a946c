"""Decode may have all blocks of a prompt before prefill has its token: nothing of it has to be moved then."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.pair import Pair
from support.pair_requests import hash_references, make_work


@pytest.mark.parametrize("transport", ["nixl", "grpc"])
@pytest.mark.parametrize("n", [1, 3])
def test_a_prompt_that_decode_caches_whole_and_prefill_computes_for_several_steps_gets_its_token(
    transport: str, n: int
) -> None:
    """A prefill worker that has just started: 192 tokens are three chunks, and landed is said within the first."""
    pair = Pair(transport=transport)
    first = make_work("a", 192, 20)
    pair.submit(first)
    pair.run()
    pair.p_pool.clear_cache()
    pair.parts.clear()
    again = pair.submit(replace(make_work("b", 192, 20, seed=3), token_ids=first.token_ids, n=n))
    pair.run()
    assert [tuple(said) for said in again.said] == [tuple(tokens) for tokens in hash_references(again.work)]
    assert again.ticket is not None and again.pushed is not None
    assert (again.ticket.num_cached_blocks, again.pushed.num_blocks, pair.parts) == (12, 0, [])
    assert [tokens for *_, tokens in again.records[0].chunks] == [64, 64, 64]
    assert len(pair.prefill._desk.attempts) == len(pair.decode._desk.attempts) == 0
    pair.close()


@pytest.mark.parametrize("ending", ["abort", "session"])
def test_one_that_ends_between_landed_and_its_token_leaves_nothing(ending: str) -> None:
    pair = Pair()
    first = make_work("a", 192, 20)
    pair.submit(first)
    pair.run()
    pair.p_pool.clear_cache()
    again = pair.submit(replace(make_work("b", 192, 20), token_ids=first.token_ids))
    for _ in range(20):
        pair.turn()
        if again.pushed is not None:
            break
    assert again.pushed is not None and not again.tokens
    if ending == "abort":
        pair.abort("b")
    else:
        pair.close_session()
    for _ in range(20):
        pair.turn()
    assert pair.is_quiet()
    assert len(pair.prefill._desk.attempts) == len(pair.decode._desk.attempts) == 0
    pair.close()
