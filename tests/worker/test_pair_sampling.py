"""Penalties, biases, bans and log-probabilities over the two cores: wherever it runs, as one process draws and says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from support.pair import Pair
from support.pair_requests import Request, hash_draws, hash_reference, make_work

from engine.grammars import Grammars
from engine.sampler import Draw, Floats, GrammarFailed
from kvrelay.requests import RequestId, Sampling, StopRule
from kvrelay.session import Work

VOCAB, EOS = 258, 257
LETTER = 120
FULL = Sampling(
    temperature=1.0,
    seed=5,
    min_p=0.001,
    repetition_penalty=1.3,
    presence_penalty=0.7,
    frequency_penalty=0.4,
    logit_bias=((3, 4.0), (65, 6.5), (200, -9.0)),
    logprobs=5,
)
GREEDY = replace(FULL, temperature=0.0)
SOME_STOPS = frozenset(range(0, 256, 3))


def a_work(sampling: Sampling, stop: StopRule, *, num_tokens: int = 40, n: int = 1, name: str = "a") -> Work:
    return replace(make_work(name, num_tokens, 1), sampling=sampling, stop=stop, n=n)


def assert_as_one_process(request: Request) -> None:
    """Each sequence's tokens, and what came with each of them."""
    for sequence in range(request.work.n):
        said = list(zip(request.said[sequence], request.logprobs[sequence], strict=True))
        assert said == hash_draws(request.work, sequence)


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("num_tokens", [5, 96])
@pytest.mark.parametrize("sampling", [FULL, GREEDY])
def test_tokens_and_logprobs_are_those_of_one_process(
    pair: Pair, sampling: Sampling, num_tokens: int, n: int, local: bool
) -> None:
    work = a_work(sampling, StopRule(20, SOME_STOPS, min_tokens=6), num_tokens=num_tokens, n=n)
    request = pair.submit(work, local=local)
    pair.run()
    assert_as_one_process(request)
    for said, logprobs in zip(request.said, request.logprobs, strict=True):
        assert len(said) >= 6
        assert [len(each.top) for each in logprobs if each is not None] == [5] * len(said)


def test_penalties_change_what_is_drawn_and_logprobs_do_not() -> None:
    plain = hash_reference(a_work(replace(GREEDY, repetition_penalty=1.0), StopRule(40)))
    assert hash_reference(a_work(GREEDY, StopRule(40))) != plain
    assert hash_reference(a_work(replace(GREEDY, logprobs=None), StopRule(40))) == hash_reference(
        a_work(GREEDY, StopRule(40))
    )


def test_after_preemption_they_are_still_the_same(transport: str) -> None:
    pair = Pair(transport=transport, decode_blocks=12, seed=3)
    works = [a_work(replace(FULL, seed=i), StopRule(60), num_tokens=30, name=f"r{i}") for i in range(6)]
    requests = [pair.submit(work) for work in works]
    pair.run(6000)
    for request in requests:
        assert_as_one_process(request)
    assert pair.counters(pair.decode)["preempted"] > 0
    pair.close()


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("k", [1, 5, 16])
def test_a_request_that_moves_after_k_tokens_goes_on_as_if_it_had_not(pair: Pair, k: int, local: bool) -> None:
    """Those of its output count as output, not as prompt, and stop tokens stay banned until the same index."""
    whole = a_work(FULL, StopRule(24, SOME_STOPS, min_tokens=18))
    draws = hash_draws(whole)
    so_far = tuple(token for token, _ in draws[:k])
    moved = replace(whole, attempt=2, token_ids=(*whole.token_ids, *so_far))
    request = pair.submit(moved, local=local)
    pair.run()
    assert list(zip(request.tokens, request.logprobs[0], strict=True)) == draws[k:]


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("max_tokens", [1, 2, 3])
@pytest.mark.parametrize("stops_at", [None, 0, 1])
@pytest.mark.parametrize("min_tokens", [0, 1, 2])
def test_a_stream_is_as_long_as_its_rule_says_whoever_draws_its_last_token(
    pair: Pair, min_tokens: int, stops_at: int | None, max_tokens: int, local: bool
) -> None:
    """FAULTS 42 and 43: a first token that stops, and one or two tokens in all, are nobody's special case."""
    plain = a_work(Sampling(temperature=0.0), StopRule(3))
    stops = frozenset[int]() if stops_at is None else frozenset({hash_reference(plain)[stops_at]})
    work = replace(plain, stop=StopRule(max_tokens, stops, min(min_tokens, max_tokens)))
    request = pair.submit(work, local=local)
    pair.run()
    assert_as_one_process(request)
    computed_elsewhere = 0 if local else 1
    assert pair.decode_steps == len(request.tokens) - computed_elsewhere
    if stops_at is not None and min_tokens <= stops_at < max_tokens:
        assert len(request.tokens) == stops_at + 1
    elif stops_at is None:
        assert len(request.tokens) == max_tokens


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("floor", [0, 1, 2, 5])
def test_a_model_that_wants_to_end_at_once_ends_right_at_the_floor(pair: Pair, floor: int, local: bool) -> None:
    """FAULTS 41 and 44."""
    sampling = Sampling(temperature=0.0, logit_bias=((LETTER, 50.0), (EOS, 100.0)))
    request = pair.submit(a_work(sampling, StopRule(20, frozenset({EOS}), floor)), local=local)
    pair.run()
    assert request.tokens == [LETTER] * floor + [EOS]
    assert pair.decode_steps == floor + local


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("k", [0, 5])
def test_a_grammar_goes_on_over_the_hand_off_and_over_a_move(transport: str, k: int, local: bool) -> None:
    """FAULTS 48. Each engine has grammars of its own: nothing of a matcher travels."""
    pair = Pair(transport=transport, grammars=bytes_grammars)
    digits = replace(FULL, grammar='{"grammars":[{"lark_grammar":"start: /[0-9]{12}/"}]}')
    whole = a_work(digits, StopRule(40, frozenset({EOS})))
    draws = hash_draws(whole, grammars=bytes_grammars())
    tokens = [token for token, _ in draws]
    assert bytes(tokens[:-1]).isdigit()
    assert (len(tokens), tokens[-1]) == (13, EOS)
    request = pair.submit(replace(whole, token_ids=(*whole.token_ids, *tokens[:k])), local=local)
    pair.run()
    assert list(zip(request.tokens, request.logprobs[0], strict=True)) == draws[k:]
    pair.close()


def bytes_grammars() -> Grammars:
    return Grammars.of_bytes(VOCAB, EOS)


class FailingAt:
    """Masks that fail the draw of this sequence at this output index, and do nothing else."""

    def __init__(self, sequence: int, index: int) -> None:
        self._sequence, self._index = sequence, index

    def disallow(self, row: Floats, draw: Draw) -> None:
        assert draw.key is not None
        if (draw.key.sequence, draw.index) == (self._sequence, self._index):
            raise GrammarFailed("no way on")


def until_ended(pair: Pair, request: Request) -> None:
    for _ in range(200):
        if request.ended:
            return
        pair.turn()
    raise AssertionError("the failed draw ended nothing")


def failing_at(sequence: int, index: int) -> Callable[[], FailingAt]:
    return lambda: FailingAt(sequence, index)


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("index", [0, 1, 7])
@pytest.mark.parametrize(("n", "sequence"), [(1, 0), (3, 0), (3, 2)])
def test_a_draw_that_cannot_be_made_ends_its_request_and_nothing_else(
    transport: str, n: int, sequence: int, index: int, local: bool
) -> None:
    """All its sequences end with it. Of a hand-off decode hears from the coordinator, as of any other end."""
    pair = Pair(transport=transport, grammars=failing_at(sequence, index))
    other = pair.submit(make_work("other", 50, 20, seed=3), local=local)
    work = a_work(replace(FULL, grammar="any"), StopRule(20), num_tokens=90, n=n)
    request = pair.submit(work, local=local)
    until_ended(pair, request)
    assert request.ended is not None
    assert request.ended.reason == "failed"
    assert (request.ended.code, request.ended.message) == ("InvalidArgument", "no way on")
    at_prefill = index == 0 and not local
    failed = [s for s, reason in request.endings if reason == "failed"]
    assert failed == ([0] if at_prefill else list(range(n)))
    if at_prefill:
        pair.abort("a")
    pair.run()
    assert tuple(other.tokens) == hash_reference(other.work)
    for pool in (pair.p_pool, pair.d_pool):
        counts = pool.counts()
        assert (counts.held, counts.reserved, counts.quarantined) == (0, 0, 0)
    assert not [*pair.prefill._desk.attempts, *pair.decode._desk.attempts]
    assert pair.writer.in_flight == 0
    assert len(request.said[sequence]) == index
    pair.close()


@pytest.mark.parametrize("turns", range(12))
def test_a_prompt_whose_first_draw_fails_gives_all_back_whenever_decode_hears_of_it(turns: int) -> None:
    pair = Pair(grammars=failing_at(0, 0), step_tokens=32)
    request = pair.submit(a_work(replace(FULL, grammar="any"), StopRule(20), num_tokens=90))
    pair.hold_notifications = True
    until_ended(pair, request)
    for _ in range(turns):
        pair.turn()
    pair.hold_notifications = False
    pair.abort("a")
    pair.run()
    assert [(e.work.request_id, e.endings) for e in pair.requests.values()] == [(RequestId("a"), [(0, "failed")])]
    pair.close()
