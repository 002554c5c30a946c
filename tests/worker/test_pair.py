"""The two cores against each other, in one thread: split equals local, and every ending gives all blocks back."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.pair import Pair
from support.pair_requests import hash_reference, make_work

from kvrelay.requests import StopRule
from kvrelay.session import Start


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 83, 1000])
@pytest.mark.parametrize("seed", [None, 7])
def test_split_gives_the_tokens_of_one_process(pair: Pair, num_tokens: int, seed: int | None) -> None:
    request = pair.submit(make_work("a", num_tokens, 20, seed))
    pair.run()
    assert tuple(request.tokens) == hash_reference(request.work)
    assert request.pushed is not None
    assert request.pushed.num_blocks == -(-num_tokens // 16)
    assert request.pushed.num_bytes == request.pushed.num_blocks * pair.p_exec.layout.block_bytes


def test_sixteen_at_once_are_each_as_alone_whatever_the_order_of_messages(transport: str) -> None:
    for seed in range(6):
        pair = Pair(transport=transport, seed=seed, step_tokens=48)
        works = [make_work(f"r{i}", 5 + 13 * i, 4 + i, seed=i if i % 2 else None) for i in range(16)]
        requests = [pair.submit(work) for work in works]
        pair.run()
        assert [tuple(r.tokens) for r in requests] == [hash_reference(w) for w in works]
        pair.close()


def test_small_decode_pool_preempts_and_still_gives_the_same_tokens(transport: str) -> None:
    pair = Pair(transport=transport, decode_blocks=12, seed=3)
    works = [make_work(f"r{i}", 30, 60) for i in range(6)]
    requests = [pair.submit(work) for work in works]
    pair.run(6000)
    assert [tuple(r.tokens) for r in requests] == [hash_reference(w) for w in works]
    assert dict(pair.decode.load(pair.now).counters)["preempted"] > 0
    pair.close()


def test_max_tokens_1_reserves_nothing_and_decode_runs_no_step(pair: Pair) -> None:
    request = pair.submit(make_work("a", 40, 1))
    pair.run()
    assert tuple(request.tokens) == hash_reference(request.work)
    assert pair.decode_steps == 0
    assert request.pushed is None


def test_first_token_that_stops_frees_decode_without_a_step(pair: Pair) -> None:
    work = make_work("a", 40, 20)
    first = hash_reference(replace(work, stop=StopRule(1)))[0]
    request = pair.submit(replace(work, stop=StopRule(20, frozenset({first}))))
    pair.run()
    assert request.tokens == [first]
    assert pair.decode_steps == 0


def test_a_flipped_byte_in_decode_pool_changes_the_tokens(pair: Pair) -> None:
    work = make_work("a", 64, 20)
    request = pair.submit(work)
    while not request.landed:
        pair.turn()
    block = pair.d_exec.pool.read(1)
    pair.d_exec.pool.write(1, 5, bytes([block[5] ^ 1]))
    pair.run()
    assert tuple(request.tokens) != hash_reference(work)


@pytest.mark.parametrize("turns", range(14))
def test_abort_in_any_phase_gives_all_blocks_back(pair: Pair, turns: int) -> None:
    pair.submit(make_work("a", 300, 20))
    for _ in range(turns):
        pair.turn()
    pair.abort("a")
    pair.run()
    assert pair.is_quiet()


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_what_is_aborted_while_it_decodes_runs_no_further_step(pair: Pair, n: int, local: bool) -> None:
    request = pair.submit(replace(make_work("a", 40, 500, seed=5), n=n), local=local)
    while len(request.tokens) < 5:
        pair.turn()
    pair.abort("a")
    pair.turn()
    steps = pair.decode_steps
    for _ in range(5):
        pair.turn()
    assert (pair.decode_steps, pair.decode.load(pair.now).running) == (steps, 0)
    assert pair.is_quiet()


def test_a_prompt_that_nobody_pushes_is_computed_no_further_when_it_is_aborted(pair: Pair) -> None:
    pair.submit(make_work("a", 1000, 1))
    for _ in range(3):
        pair.turn()
    assert pair.prefill.load(pair.now).queued_tokens > 500
    pair.abort("a")
    pair.turn()
    assert pair.is_quiet()


def test_a_start_whose_first_token_ends_the_request_leaves_nothing_at_decode(pair: Pair) -> None:
    """A coordinator sends an abort instead; one that does not may not cost blocks, nor the worker its life."""
    work = make_work("a", 40, 20)
    first = hash_reference(replace(work, stop=StopRule(1)))[0]
    request = pair.submit(replace(work, stop=StopRule(20, frozenset({first}))))
    while request.ticket is None:
        pair.turn()
    request.started = request.aborted = True
    pair._command(pair.to_decode, Start(work.request_id, 1, (first,)))
    pair.run()
    assert pair.is_quiet()


@pytest.mark.parametrize("turns", range(14))
def test_session_end_in_any_phase_gives_all_blocks_back(pair: Pair, turns: int) -> None:
    pair.submit(make_work("a", 300, 20))
    pair.submit(make_work("b", 20, 3))
    for _ in range(turns):
        pair.turn()
    pair.close_session()
    pair.run()
    assert pair.is_quiet()


def test_abort_that_overtakes_its_request_leaves_a_tombstone(pair: Pair) -> None:
    work = make_work("a", 40, 20)
    pair.submit(work)
    commands = pair.to_decode["session"]
    reserve = commands.pop()
    pair.abort("a")
    commands.append(reserve)
    pair.run()
    assert pair.is_quiet()
    assert pair.decode.load(pair.now).blocks.reserved == 0


@pytest.mark.parametrize("turns", range(2, 12))
def test_lost_prefill_ends_the_attempt_and_its_blocks_return_after_the_peers_end(pair: Pair, turns: int) -> None:
    request = pair.submit(make_work("a", 300, 20))
    for _ in range(turns):
        pair.turn()
    pair.lose_prefill()
    for _ in range(400):
        pair._deliver(pair.to_decode, pair.decode)
        plan = pair.decode.schedule(pair.now)
        if plan is not None:
            pair.decode.apply(plan, pair.d_exec.run(plan), pair.now)
        pair._act(pair.decode)
        pair.now += 0.01
        pair.d_pool.check_integrity()
    if request.landed:
        assert request.ended is None or request.ended.reason == "length"
    pair.abort("a")
    pair._deliver(pair.to_decode, pair.decode)
    pair._act(pair.decode)
    load = pair.decode.load(pair.now)
    assert load.blocks.free + load.blocks.cached == load.blocks.total
    assert load.transfers_in_flight == 0


def test_what_cannot_be_taken_is_refused_by_name(pair: Pair) -> None:
    base = make_work("x", 40, 20)
    cases = {
        "token_ids": replace(base, request_id="token_ids", token_ids=(*base.token_ids[:-1], 999)),
        "max_tokens": replace(base, request_id="max_tokens", stop=StopRule(100_000)),
    }
    requests = {name: pair.submit(work) for name, work in cases.items()}
    pair.run()
    assert {name: r.refused.field for name, r in requests.items() if r.refused} == {name: name for name in cases}
