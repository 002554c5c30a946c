"""Requests made to hurt: refused in no time and little memory; nobody else's stream feels them."""

from __future__ import annotations

import asyncio
import functools
import gc
import random
import time
from pathlib import Path
from typing import Any

import pytest
from support.door import MODEL, Answer, Door, until
from support.fake_workers import FakeWorker

from coordinator.detokenize import Detokenizer
from coordinator.request_wire import raw_request
from coordinator.validate import Limits, RawRequest, check, sampling_of
from kvrelay.errors import Internal, InvalidArgument
from kvrelay.session import Hello, Start
from kvrelay.v1 import inference_pb2

Pair = tuple[FakeWorker, FakeWorker]
LIMIT = 64 * 16
VOCAB = 258
NAN, INF = float("nan"), float("inf")
LIMITS = Limits("m", VOCAB, LIMIT, (256,))
TOKENS = [97 + i % 26 for i in range(LIMIT)]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("prompt", [0, 1, LIMIT - 1])
@pytest.mark.parametrize("most", [0, -1, LIMIT, 10 * LIMIT, 2**31 - 1, 2**63 - 1])
async def test_a_prompt_is_never_shortened_for_what_is_to_follow(
    door: Door, pair: Pair, prompt: int, most: int
) -> None:
    answer = await door.ask(tokens={"ids": [5] * prompt}, max_tokens=most, echo=True)
    assert isinstance(answer.error, InvalidArgument)
    assert answer.error.field == ("max_tokens" if prompt else "tokens.ids")
    assert [type(c) for worker in pair for c in worker.got] == [Hello, Hello]
    good = await door.ask(tokens={"ids": [5] * max(1, prompt)}, max_tokens=1)
    assert good.accepted is not None
    assert (good.accepted.prompt_tokens, good.ids) == (max(1, prompt), [97])


def test_each_of_a_thousand_bad_ids_is_named_by_its_position() -> None:
    rng = random.Random(1)
    for _ in range(1000):
        ids = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 50))]
        check(RawRequest(token_ids=tuple(ids)), LIMITS)
        at = rng.randrange(len(ids))
        ids[at] = rng.choice([-1, VOCAB, VOCAB + 1, 2**31, -(2**63), rng.randrange(VOCAB, 2**40)])
        with pytest.raises(InvalidArgument) as info:
            check(RawRequest(token_ids=tuple(ids)), LIMITS)
        assert info.value.field == f"tokens.ids[{at}]"


@pytest.mark.parametrize(
    ("temperature", "drawn_at"),
    [(0.0, 0.0), (1e-30, 0.0), (1e-5, 1e-5), (1e-4, 1e-4), (100.0, 100.0), (NAN, None), (INF, None), (-1.0, None)],
)
@pytest.mark.parametrize("top_p", [0.0, 1e-9, 1.0, 1.0001, NAN])
@pytest.mark.parametrize("top_k", [-2, -1, 0, 1, VOCAB, VOCAB + 1, 10**7])
def test_what_is_numerically_hopeless_never_reaches_a_sampler(
    temperature: float, drawn_at: float | None, top_p: float, top_k: int
) -> None:
    raw = RawRequest(text="x", temperature=temperature, top_p=top_p, top_k=top_k)
    if drawn_at is None or top_k < 0 or top_p not in (1e-9, 1.0):
        with pytest.raises(InvalidArgument, match=r"^sampling\."):
            check(raw, LIMITS)
        return
    check(raw, LIMITS)
    sampling = sampling_of(raw, 0, LIMITS)
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (drawn_at, top_p, min(top_k, VOCAB))


HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    **{f"bias of {i}": ({"sampling": {"logit_bias": {i: 1.0}}}, f"sampling.logit_bias[{i}]") for i in (VOCAB, 2**40)},
    "bias of -1": ({"sampling": {"logit_bias": {-1: 1.0}}}, "sampling.logit_bias[-1]"),
    **{f"bias {v}": ({"sampling": {"logit_bias": {7: v}}}, "sampling.logit_bias[7]") for v in (NAN, INF, 1e38)},
    "100,000 biases": ({"sampling": {"logit_bias": dict.fromkeys(range(100000), 1.0)}}, "sampling.logit_bias"),
    **{f"{k} logprobs": ({"sampling": {"logprobs": k}}, "sampling.logprobs") for k in (-1, VOCAB, 10**9)},
    **{f"{n} sequences": ({"n": n}, "n") for n in (0, 10**6)},
    "100,000 stop strings": ({"stop": [f"s{i}" for i in range(100_000)]}, "stop"),
    "a stop string of 1 MB": ({"stop": ["x" * 1_000_000]}, "stop[0]"),
    "a million stop ids": ({"stop_token_ids": [1] * 10**6}, "stop_token_ids"),
    "100,000 messages": ({"chat": {"messages": [{"role": "user"}] * 100_000}}, "chat.messages"),
    "100,000 choices": ({"choice": {"texts": ["a"] * 100_000}}, "choice.texts"),
    "a million tokens": ({"tokens": {"ids": [1] * 10**6}}, "tokens.ids"),
    "a salt of 1 MB": ({"cache_salt": "x" * 1_000_000}, "cache_salt"),
}


def with_prompt(fields: dict[str, Any]) -> dict[str, Any]:
    return fields if {"chat", "tokens"} & fields.keys() else {"text": "x", **fields}


async def test_what_is_made_to_hurt_is_refused_and_leaves_nothing_behind(door: Door, pair: Pair) -> None:
    """The first round pays for what is made once."""
    before = 0
    for round_ in range(3):
        gc.collect()
        before = before if round_ > 1 else resident_bytes()
        for fields, path in HOSTILE.values():
            answer = await door.ask(**with_prompt(fields))
            assert isinstance(answer.error, InvalidArgument)
            assert answer.error.field == path
            assert len(answer.error.message) < 300
    gc.collect()
    assert resident_bytes() - before < 50 * 2**20
    assert [type(c) for worker in pair for c in worker.got] == [Hello, Hello]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_refusal_holds_the_loop_for_less_than_a_tenth_of_a_second(name: str) -> None:
    """From the message as it was read to its refusal, the best of three: other streams stand meanwhile."""
    fields, path = HOSTILE[name]
    request = inference_pb2.GenerateRequest(**with_prompt(fields))
    took = []
    for _ in range(3):
        began = time.perf_counter()
        with pytest.raises(InvalidArgument) as info:
            check(raw_request(request, LIMITS), LIMITS)
        took.append(time.perf_counter() - began)
        assert info.value.field == path
    assert min(took) < 0.1


async def test_neighbours_stay_exact_while_all_that_hurts_is_sent(door: Door, pair: Pair) -> None:
    pair[1].step_s = 0.005
    beside = [asyncio.ensure_future(door.ask(text=f"good {i}", max_tokens=100)) for i in range(4)]
    await until(lambda: len(pair[1].commands(Start)) == 4)
    answers = await asyncio.gather(*(door.ask(**with_prompt(fields)) for fields, _ in HOSTILE.values()))
    assert {type(answer.error) for answer in answers} == {InvalidArgument}
    assert [answer.ids for answer in await asyncio.gather(*beside)] == [TOKENS[:100]] * 4


async def test_one_stream_whose_text_cannot_be_made_ends_alone(
    monkeypatch: pytest.MonkeyPatch, door: Door, pair: Pair
) -> None:
    """The third of four has a decoder that raises at its fifth token."""
    made: list[Detokenizer] = []
    make = MODEL.codec.detokenizer

    class Broken:
        def __init__(self) -> None:
            self._count = 0

        def push(self, token_id: int) -> str:
            self._count += 1
            if self._count == 5:
                raise ValueError("an order of bytes that no decoder has seen")
            return chr(token_id)

        def flush(self) -> str:
            return ""

    def detokenizer(skip_special_tokens: bool = True) -> Detokenizer:
        made.append(Broken() if len(made) == 2 else make(skip_special_tokens))
        return made[-1]

    monkeypatch.setattr(MODEL.codec, "detokenizer", detokenizer)
    answers: list[asyncio.Task[Answer]] = []
    for i in range(4):
        answers.append(asyncio.ensure_future(door.ask(text=f"stream {i}", max_tokens=50)))
        await until(functools.partial(lambda n: len(made) == n, i + 1))
    good = [await answers[i] for i in (0, 1, 3)]
    assert [(a.error, a.ids, a.text) for a in good] == [(None, TOKENS[:50], "".join(map(chr, TOKENS[:50])))] * 3
    broken = await answers[2]
    assert type(broken.error) is Internal
    assert (broken.error.message, broken.ids) == ("detokenizing failed", TOKENS[:4])
    await door.idle()


async def test_twenty_streams_of_random_tokens_have_the_text_of_their_whole_decode(door: Door, pair: Pair) -> None:
    rng = random.Random(4)
    prefill, decode = pair
    prefill.script = decode.script = script = [rng.randrange(VOCAB) for _ in range(100)]
    fields: dict[str, Any] = {"ignore_eos": True, "max_tokens": 100}
    asked = [door.ask(text="x", **fields, skip_special_tokens=bool(i % 2)) for i in range(20)]
    for i, answer in enumerate(await asyncio.gather(*asked)):
        assert answer.error is None
        assert answer.ids == script
        assert answer.text == MODEL.codec.decode(script, bool(i % 2))
    await door.idle()


def test_random_tokens_in_turns_disturb_no_other_stream() -> None:
    rng, codec = random.Random(5), MODEL.codec
    scripts = [[rng.randrange(VOCAB) for _ in range(2000)] for _ in range(20)]
    streams = [codec.detokenizer(bool(i % 2)) for i in range(20)]
    texts = ["" for _ in streams]
    for at in range(2000):
        for i, stream in enumerate(streams):
            texts[i] += stream.push(scripts[i][at])
    for i, stream in enumerate(streams):
        assert texts[i] + stream.flush() == codec.decode(scripts[i], bool(i % 2))
