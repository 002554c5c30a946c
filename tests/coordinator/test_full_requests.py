"""Every field of a request through the door: what reaches the workers, and what comes back."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio
from support.door import MODEL, Door, join, until
from support.fake_workers import FakeWorker

from coordinator import validate
from coordinator.chat import ChatTemplate, extent
from coordinator.main import Coordinator
from coordinator.text import LONG_TEXT, ByteCodec
from kvrelay.config import CoordinatorConfig
from kvrelay.errors import InvalidArgument
from kvrelay.requests import Priority, Role
from kvrelay.rpc.channel import open_channel
from kvrelay.session import Hello, Prefill, Reserve, Work
from kvrelay.v1 import common_pb2, inference_pb2, model_pb2, model_pb2_grpc

Pair = tuple[FakeWorker, FakeWorker]
TEMPLATE = "{% for m in messages %}<{{ m.role }}{{ m.name }}>{{ m.content }}{% endfor %}{{ tools | tojson }}{{ mood }}"


def work_of(pair: Pair) -> Work:
    """Of the last request, as prefill got it."""
    work: Work = pair[0].commands(Prefill)[-1].work
    return work


@pytest_asyncio.fixture
async def chatty() -> AsyncIterator[Door]:
    """A coordinator whose model has a chat template, with a worker of each role."""
    codec = ByteCodec()
    codec.template = ChatTemplate(TEMPLATE, {})
    coordinator = Coordinator(CoordinatorConfig(listen="127.0.0.1:0", executor="hash"), replace(MODEL, codec=codec))
    address = await coordinator.start()
    async with (
        open_channel(address) as channel,
        FakeWorker(Role.PREFILL, "p0") as prefill,
        FakeWorker(Role.DECODE, "d0") as decode,
    ):
        door = Door(coordinator, address, channel)
        await join(door, prefill, decode)
        yield door
    await coordinator.stop(0)


def chat(**more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "hi", "extra_json": '{"name": "-anna"}'}, {"role": "tool", "content": "ok"}]
    return {"chat": {"messages": messages, **more}, "max_tokens": 2, "echo": True}


async def test_further_keys_tools_and_variables_reach_the_template(chatty: Door) -> None:
    answer = await chatty.ask(**chat(tools_json='[{"a": 1}]', template_json='{"mood": "!"}'))
    assert answer.accepted is not None
    assert answer.accepted.prompt_text == '<user-anna>hi<tool>ok[{"a": 1}]!'
    answer = await chatty.ask(**chat())
    assert answer.accepted is not None
    assert answer.accepted.prompt_text == "<user-anna>hi<tool>oknull"


async def test_a_long_chat_is_rendered_all_the_same_and_may_be_truncated(chatty: Door) -> None:
    messages = [{"role": "user", "content": "x" * LONG_TEXT}, {"role": "user", "content": "end"}]
    answer = await chatty.ask(chat={"messages": messages}, max_tokens=1, truncate_prompt=7, echo=True)
    assert answer.accepted is not None
    assert (answer.accepted.prompt_tokens, answer.accepted.prompt_text) == (7, "endnull")
    answer = await chatty.ask(chat={"messages": messages}, max_tokens=1)
    assert isinstance(answer.error, InvalidArgument)
    assert answer.error.field == "chat"


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        (chat(tools_json="{"), "chat.tools_json"),
        (chat(tools_json="{}"), "chat.tools_json"),
        (chat(tools_json="[NaN]"), "chat.tools_json"),
        (chat(tools_json="[" * 100_000), "chat.tools_json"),
        (chat(template_json="[]"), "chat.template_json"),
        (chat(template_json="x"), "chat.template_json"),
        (chat(template_json='"' + "x" * 2**20 + '"'), "chat"),
        (chat(template_json='{"mood": "\\ud800"}'), "chat"),
        (chat(messages=[{"role": "a", "extra_json": "[]"}]), "chat.messages[0].extra_json"),
        (chat(messages=[{"role": "a"}, {"role": "b", "extra_json": "{"}]), "chat.messages[1].extra_json"),
        (chat(messages=[{"role": "a", "extra_json": '{"role": "b"}'}]), "chat.messages[0].extra_json"),
        (chat(messages=[{"role": "a", "extra_json": '{"content": "b"}'}]), "chat.messages[0].extra_json"),
        (chat(messages=[{"role": ""}]), "chat.messages[0].role"),
        (chat(messages=[{"role": "a"}] * 8193), "chat.messages"),
        (chat(messages=[]), "chat.messages"),
        ({"text": "x", "priority": 4}, "priority"),
        ({"text": "x", "priority": -1}, "priority"),
        ({"text": "x", "truncate_prompt": 0}, "truncate_prompt"),
        ({"text": "x", "min_tokens": -1}, "min_tokens"),
        ({"text": "x", "min_tokens": 1024}, "min_tokens"),
        ({"text": "x", "sampling": {"min_p": 2.0}}, "sampling.min_p"),
        ({"text": "x", "sampling": {"logprobs": -1}}, "sampling.logprobs"),
        ({"text": "x", "sampling": {"logit_bias": {258: 1.0}}}, "sampling.logit_bias[258]"),
        ({"text": "x", "regex": ""}, "regex"),
        ({"text": "x", "regex": "("}, "regex"),
        ({"text": "x", "choice": {}}, "choice.texts"),
        ({"text": "x", "choice": {"texts": ["a"] * 100_000}}, "choice.texts"),
        ({"text": "x", "json_schema": "{"}, "json_schema"),
        ({"text": "x", "lark": "start: nobody"}, "lark"),
        ({"text": "x", "regex": "a", "ignore_eos": True}, "ignore_eos"),
    ],
)
async def test_what_is_wrong_is_named_and_queued_nowhere(chatty: Door, fields: dict[str, Any], path: str) -> None:
    answer = await chatty.ask(**fields)
    assert isinstance(answer.error, InvalidArgument)
    assert answer.error.field == path
    assert path in answer.error.message
    assert len(answer.error.message) < 600
    assert chatty.coordinator.dispatcher.num_open == 0
    assert chatty.counters.total() == 0


async def test_how_to_draw_and_whom_to_prefer_reach_the_workers(door: Door, pair: Pair) -> None:
    sampling = {
        "temperature": 0.5,
        "min_p": 0.25,
        "repetition_penalty": 1.5,
        "presence_penalty": -1.0,
        "frequency_penalty": 2.0,
        "logit_bias": {9: 1.5, 3: -100.0},
        "logprobs": 2,
    }
    asked = {"sampling": sampling, "min_tokens": 2, "max_tokens": 3, "priority": common_pb2.PRIORITY_BATCH}
    answer = await door.ask(text="x", regex="[a-z]+", **asked)
    assert answer.error is None
    work = work_of(pair)
    got = work.sampling
    assert (got.temperature, got.min_p, got.repetition_penalty) == (0.5, 0.25, 1.5)
    assert (got.presence_penalty, got.frequency_penalty, got.logprobs) == (-1.0, 2.0, 2)
    assert got.logit_bias == ((3, -100.0), (9, 1.5))
    assert json.loads(got.grammar)["grammars"]
    assert (work.stop.min_tokens, work.priority) == (2, Priority.BATCH)
    assert pair[1].commands(Reserve)[0].work == work


@pytest.mark.parametrize(
    ("number", "priority"),
    [(0, Priority.NORMAL), (1, Priority.BATCH), (2, Priority.NORMAL), (3, Priority.INTERACTIVE)],
)
async def test_a_request_has_the_priority_that_was_asked_for(
    door: Door, pair: Pair, number: int, priority: Priority
) -> None:
    assert (await door.ask(text="x", max_tokens=1, priority=number)).error is None
    assert work_of(pair).priority is priority


async def test_log_probabilities_come_with_each_token_or_not_at_all(door: Door, pair: Pair) -> None:
    answer = await door.ask(text="x", max_tokens=3, sampling={"logprobs": 2})
    for index, token in enumerate(answer.tokens):
        assert token.logprobs.token == -index - token.token_id / 1024
        top = [(t.token_id, t.logprob) for t in token.logprobs.top]
        assert top == [(0, -float(index)), (1, -index - 1 / 1024)]
    answer = await door.ask(text="x", max_tokens=3, sampling={"logprobs": 0})
    assert [len(t.logprobs.top) for t in answer.tokens] == [0, 0, 0]
    assert all(t.HasField("logprobs") for t in answer.tokens)
    answer = await door.ask(text="x", max_tokens=3)
    assert not any(t.HasField("logprobs") for t in answer.tokens)


@pytest.mark.parametrize(
    ("fields", "ids", "text"),
    [
        ({"text": "hello"}, b"hello", "hello"),
        ({"text": "hello", "truncate_prompt": 3}, b"llo", "llo"),
        ({"text": "hello", "truncate_prompt": 9}, b"hello", "hello"),
        ({"tokens": {"ids": [257, 72, 105]}}, [257, 72, 105], "Hi"),
        ({"tokens": {"ids": [257, 72, 105]}, "skip_special_tokens": False}, [257, 72, 105], "<bos>Hi"),
        ({"tokens": {"ids": [-5, 72, 105]}, "truncate_prompt": 2}, [72, 105], "Hi"),
        ({"tokens": {"ids": [72] * 5000}, "truncate_prompt": 1000}, [72] * 1000, "H" * 1000),
    ],
)
async def test_the_prompt_is_truncated_in_front_and_echoed(
    door: Door, pair: Pair, fields: dict[str, Any], ids: Any, text: str
) -> None:
    answer = await door.ask(max_tokens=1, echo=True, **fields)
    assert answer.accepted is not None
    assert (answer.accepted.prompt_tokens, answer.accepted.prompt_text) == (len(ids), text)
    assert work_of(pair).token_ids == tuple(ids)
    answer = await door.ask(max_tokens=1, **fields)
    assert answer.accepted is not None
    assert answer.accepted.prompt_text == ""


@pytest.mark.parametrize(
    ("script", "fields", "ids", "text"),
    [
        (b"injury!", {"stop_token_ids": [ord("y")]}, b"injury", "injur"),
        (b"injury!", {"stop_token_ids": [ord("y")], "include_stop": True}, b"injury", "injury"),
        (b"an END.", {"stop": ["END"]}, b"an END", "an "),
        (b"an END.", {"stop": ["END"], "include_stop": True}, b"an END", "an END"),
        ([72, 256], {}, [72, 256], "H"),
        ([72, 256], {"include_stop": True}, [72, 256], "H"),
        ([72, 256], {"skip_special_tokens": False}, [72, 256], "H"),
        ([72, 256], {"skip_special_tokens": False, "include_stop": True}, [72, 256], "H<eos>"),
        ([72, 257, 73, 256], {"skip_special_tokens": False}, [72, 257, 73, 256], "H<bos>I"),
        (b"xxxyz", {"stop": ["x"], "min_tokens": 3, "max_tokens": 5}, b"xxxyz", "xxxyz"),
        (b"xxxxz", {"stop": ["x"], "min_tokens": 3, "max_tokens": 5}, b"xxxx", "xxx"),
        (b"\xed\xa0\x80\xffa", {"max_tokens": 5}, b"\xed\xa0\x80\xffa", "\ufffd\ufffd\ufffd\ufffda"),
    ],
)
async def test_what_ends_a_text_and_what_is_part_of_it(
    door: Door, pair: Pair, script: Any, fields: dict[str, Any], ids: Any, text: str
) -> None:
    for worker in pair:
        worker.script = list(script)
    answer = await door.ask(text="q", **fields)
    assert answer.error is None
    assert (answer.ids, answer.text) == (list(ids), text)


async def test_the_model_tells_the_limits_that_requests_are_held_to(door: Door, pair: Pair) -> None:
    info = await model_pb2_grpc.ModelServiceStub(door.channel).GetModel(model_pb2.GetModelRequest())
    assert (info.max_logit_bias, info.max_logprobs, info.max_grammar_bytes) == (1024, 20, 65536)
    assert (info.max_text_bytes, info.max_token_ids) == (2**20, 2**18)
    assert info.max_logprobs == validate.MAX_LOGPROBS
    bias = dict.fromkeys(range(258), 1.0)
    ok = await door.ask(text="x", max_tokens=1, sampling={"logprobs": info.max_logprobs, "logit_bias": bias})
    assert ok.error is None
    over = await door.ask(text="x", max_tokens=1, sampling={"logprobs": info.max_logprobs + 1})
    assert isinstance(over.error, InvalidArgument)
    assert [type(c) for c in pair[1].got] == [Hello]


def test_an_extent_is_counted_no_further_than_it_matters() -> None:
    assert extent(({"role": "user", "content": "hi"},), 1000) < 100
    assert extent(({"content": "x" * 5000}, *({"content": "y"},) * 10**6), 2048) >= 2048
    assert extent([[[]]] * 5000, 2048) >= 2048
    assert extent(None, 10) == 1


async def test_a_request_without_new_fields_is_what_it_was(door: Door, pair: Pair) -> None:
    request = inference_pb2.GenerateRequest(text="x", max_tokens=1)
    assert await door.stub.Generate(request).read() is not None
    await until(lambda: pair[0].commands(Prefill))
    sampling = work_of(pair).sampling
    assert not (sampling.looks_back or sampling.logit_bias or sampling.grammar or sampling.min_p)
    assert sampling.logprobs is None
    assert work_of(pair).stop.min_tokens == 0
