"""What tokens bring with them through the coordinator, and draws that cannot be made; over real gRPC, workers fake."""

from __future__ import annotations

import asyncio

import pytest
from support.door import Answer, Door, Pairs, held, read_all, until
from support.fake_workers import FakeWorker, logprobs_of

from kvrelay.errors import InvalidArgument
from kvrelay.requests import Priority, Sampling
from kvrelay.session import Abort, Ended, Prefill, Report, Reserve, TokenOut
from kvrelay.v1 import common_pb2, inference_pb2

FEW = Sampling(logprobs=2)


def assert_each_has_its_own(tokens: list[inference_pb2.Token]) -> None:
    """Those that the fake worker made for just this token."""
    for token in tokens:
        expected = logprobs_of(FEW, token.index, token.token_id)
        assert expected is not None
        assert token.logprobs.token == expected.token
        assert tuple((top.token_id, top.logprob) for top in token.logprobs.top) == expected.top


async def test_every_token_has_its_logprobs_that_of_prefill_too(
    door: Door, pair: tuple[FakeWorker, FakeWorker]
) -> None:
    answer = await door.ask(text="hello", max_tokens=6, sampling={"logprobs": 2})
    assert (answer.error, len(answer.tokens)) == (None, 6)
    assert_each_has_its_own(answer.tokens)


@pytest.mark.parametrize(("sampling", "expected"), [({}, False), ({"logprobs": 0}, True)])
async def test_none_come_unasked_and_0_is_the_drawn_token_alone(
    door: Door, pair: tuple[FakeWorker, FakeWorker], sampling: dict[str, int], expected: bool
) -> None:
    answer = await door.ask(text="hello", max_tokens=3, sampling=sampling)
    assert [token.HasField("logprobs") for token in answer.tokens] == [expected] * 3
    assert [len(token.logprobs.top) for token in answer.tokens] == [0] * 3


@pytest.mark.parametrize("k", [0, 1, 5])
async def test_a_stream_that_moves_has_the_logprobs_of_each_index_once(door: Door, pairs: Pairs, k: int) -> None:
    p0, _, d0, _ = pairs
    held(p0, "token0") if k == 0 else held(d0, f"token {k}")
    answer, asked = door.begin(text="hello", max_tokens=9, sampling={"logprobs": 2})
    await until(lambda: d0.commands(Reserve) and p0.commands(Prefill) and len(answer.tokens) == k)
    await d0.die()
    await asked
    assert answer.finished is not None
    assert (answer.error, len(answer.tokens), answer.finished.migrations) == (None, 9, 1)
    assert_each_has_its_own(answer.tokens)


async def test_text_that_is_held_back_holds_no_logprobs_back(door: Door, pair: tuple[FakeWorker, FakeWorker]) -> None:
    answer = await door.ask(text="hello", max_tokens=6, stop=["abcx"], sampling={"logprobs": 2})
    assert [token.text for token in answer.tokens] == ["", "", "", "abcd", "e", "f"]
    assert_each_has_its_own(answer.tokens)


class Sequences(Answer):
    """The tokens of several sequences, in the order in which they came."""

    def take(self, message: inference_pb2.GenerateResponse) -> None:
        if message.WhichOneof("event") == "token":
            self.tokens.append(message.token)


@pytest.mark.parametrize("local", [False, True])
async def test_first_tokens_of_three_sequences_keep_their_own_logprobs(door: Door, pairs: Pairs, local: bool) -> None:
    if local:
        await pairs[0].die()
        await pairs[1].die()
        await until(lambda: len(door.coordinator.roster.listing()) == 2)
    answer = Sequences()
    await read_all(door.call(text="hello", n=3, max_tokens=4, sampling={"logprobs": 2}), answer)
    assert answer.error is None
    assert sorted((t.sequence, t.index) for t in answer.tokens) == [(s, i) for s in range(3) for i in range(4)]
    assert_each_has_its_own(answer.tokens)


async def test_a_first_token_that_is_said_twice_before_the_fork_counts_with_its_own_logprobs(
    door: Door, pair: tuple[FakeWorker, FakeWorker]
) -> None:
    prefill, decode = pair
    held(prefill, "token0")
    held(decode, "decode")
    answer, call = Sequences(), door.call(text="hello", n=2, max_tokens=2, sampling={"logprobs": 2})
    asked = asyncio.ensure_future(read_all(call, answer))
    await until(lambda: prefill.commands(Prefill))
    rid = prefill.commands(Prefill)[0].work.request_id
    for sequence, token in ((1, 98), (1, 99), (0, 97)):
        out = TokenOut(rid, 0, sequence, 0, token, logprobs_of(FEW, 0, token))
        prefill.say(Report(tokens=(out,)))
    await until(lambda: len(answer.tokens) == 2)
    call.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    assert [(t.sequence, t.token_id) for t in answer.tokens] == [(0, 97), (1, 99)]
    assert_each_has_its_own(answer.tokens)


async def test_workers_hear_all_of_how_tokens_are_drawn(door: Door, pair: tuple[FakeWorker, FakeWorker]) -> None:
    prefill, decode = pair
    sampling = {
        "seed": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.7,
        "frequency_penalty": -0.4,
        "logit_bias": {9: 1.0, 3: -2.0},
        "logprobs": 1,
    }
    fields = {"min_tokens": 2, "priority": common_pb2.PRIORITY_INTERACTIVE, "regex": "[a-z]+"}
    answer = await door.ask(text="hello", max_tokens=4, sampling=sampling, **fields)
    assert answer.error is None
    (reserve,) = decode.commands(Reserve)
    (sent,) = prefill.commands(Prefill)
    assert sent.work == reserve.work
    work = sent.work
    assert (work.stop.max_tokens, work.stop.min_tokens, work.priority) == (4, 2, Priority.INTERACTIVE)
    assert work.sampling.grammar
    assert work.sampling == Sampling(
        seed=7,
        min_p=0.1,
        repetition_penalty=1.3,
        presence_penalty=0.7,
        frequency_penalty=-0.4,
        logit_bias=((3, -2.0), (9, 1.0)),
        grammar=work.sampling.grammar,
        logprobs=1,
    )


async def test_a_draw_that_prefill_cannot_make_ends_the_request_by_its_own_fault(door: Door, pairs: Pairs) -> None:
    """Decode is told, so that the ticket ends; nobody else tries."""
    p0, p1, d0, d1 = pairs
    held(p0, "token0")
    answer, asked = door.begin(text="hello", max_tokens=4)
    await until(lambda: p0.commands(Prefill))
    rid = p0.commands(Prefill)[0].work.request_id
    p0.say(Report(ended=(Ended(rid, 0, 0, "failed", "InvalidArgument", "the grammar allows no token"),)))
    await asked
    assert isinstance(answer.error, InvalidArgument)
    assert answer.error.message == "the grammar allows no token"
    await until(lambda: d0.commands(Abort) == [Abort(rid, 0)])
    assert (p0.commands(Abort), p1.commands(Prefill), d1.commands(Reserve)) == ([], [], [])
    assert door.counters["migrated"] == 0
    await door.idle()


@pytest.mark.parametrize("n", [1, 3])
async def test_a_draw_that_decode_cannot_make_ends_the_whole_stream(door: Door, pairs: Pairs, n: int) -> None:
    _, p1, d0, d1 = pairs
    held(d0, "token 2")
    answer = Sequences()
    asked = asyncio.ensure_future(read_all(door.call(text="hello", n=n, max_tokens=4), answer))
    await until(lambda: len(answer.tokens) == 2 * n)
    rid, words = d0.commands(Reserve)[0].work.request_id, "the grammar allows no token"
    d0.say(Report(ended=tuple(Ended(rid, 0, s, "failed", "InvalidArgument", words) for s in range(n))))
    await asked
    assert isinstance(answer.error, InvalidArgument)
    assert answer.error.message == words
    assert (len(answer.tokens), d1.commands(Reserve), p1.commands(Prefill)) == (2 * n, [], [])
    assert door.counters["migrated"] == 0
    assert door.counters["outcome.InvalidArgument"] == 1
    await door.idle()
