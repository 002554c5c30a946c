"""Chats over the OpenAI door, with a template of a few words over plain bytes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio
from support.door import MODEL, Door
from support.fake_workers import FakeWorker
from support.http_door import HttpDoor

from coordinator.chat import ChatTemplate
from coordinator.main import Coordinator
from coordinator.text import ByteCodec
from kvrelay.config import CoordinatorConfig
from kvrelay.rpc.channel import open_channel
from kvrelay.session import Prefill

Pair = tuple[FakeWorker, FakeWorker]
CHAT = "/v1/chat/completions"
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if tools %}[{{ tools | tojson }}]{% endif %}{{ mood }}{% if add_generation_prompt %}<go>{% endif %}"
)
USER = {"role": "user", "content": "hi"}


class Templated(ByteCodec):
    template = ChatTemplate(TEMPLATE, {})


@pytest_asyncio.fixture
async def door() -> AsyncIterator[Door]:
    config = CoordinatorConfig(listen="127.0.0.1:0", http="127.0.0.1:0", executor="hash")
    coordinator = Coordinator(config, replace(MODEL, codec=Templated()))
    address = await coordinator.start()
    async with open_channel(address) as channel:
        yield Door(coordinator, address, channel)
    await coordinator.stop(0)


def prompt_of(prefill: FakeWorker) -> str:
    return bytes(prefill.commands(Prefill)[-1].work.token_ids).decode()


async def test_a_chat_in_one_piece(http: HttpDoor, pair: Pair) -> None:
    answer = await http.post(CHAT, {"messages": [USER], "max_completion_tokens": 3})
    said = answer.json
    assert said["id"] == f"chatcmpl-{answer.headers['x-kvrelay-request-id']}"
    assert (said["object"], said["model"]) == ("chat.completion", "hash")
    message = {"role": "assistant", "content": "abc", "refusal": None}
    assert said["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}]
    assert said["usage"]["prompt_tokens"] == len("<user>hi<go>")
    assert prompt_of(pair[0]) == "<user>hi<go>"


async def test_a_stream_begins_with_the_role_of_each_choice(http: HttpDoor, pair: Pair) -> None:
    body = {"messages": [USER], "max_tokens": 2, "n": 2, "stream": True}
    *chunks, done = (await http.post(CHAT, body)).events
    assert done == "[DONE]"
    for choice in (0, 1):
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice]
        assert [c["delta"] for c in own] == [
            {"role": "assistant", "content": ""},
            {"content": chr(97 + choice)},
            {"content": chr(98 + choice)},
            {},
        ]
        assert [c["finish_reason"] for c in own] == [None, None, None, "length"]
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"}


async def test_text_held_back_comes_with_the_end(http: HttpDoor, pair: Pair) -> None:
    body = {"messages": [USER], "max_tokens": 3, "stop": "cx", "stream": True}
    *_, last, _ = (await http.post(CHAT, body)).events
    assert last["choices"][0]["delta"] == {"content": "c"}
    assert last["choices"][0]["finish_reason"] == "length"


async def test_log_probabilities_of_a_chat(http: HttpDoor, pair: Pair) -> None:
    body = {"messages": [USER], "max_tokens": 2, "logprobs": True, "top_logprobs": 1}
    whole = (await http.post(CHAT, body)).json["choices"][0]["logprobs"]
    assert whole["content"][0] == {
        "token": "a",
        "logprob": -97 / 1024,
        "bytes": [97],
        "top_logprobs": [{"token": "\x00", "logprob": 0.0, "bytes": [0]}],
    }
    assert [one["token"] for one in whole["content"]] == ["a", "b"]
    chunks = [c["choices"][0] for c in (await http.post(CHAT, {**body, "stream": True})).events[:-1]]
    streamed = [one for c in chunks if c["logprobs"] for one in c["logprobs"]["content"]]
    assert streamed == whole["content"]


@pytest.mark.parametrize(
    ("more", "prompt"),
    [
        ({"tools": [{"a": 1}]}, '<user>hi[[{"a": 1}]]<go>'),
        ({"tools": [{"a": 1}], "tool_choice": "none"}, "<user>hi<go>"),
        ({"chat_template_kwargs": {"mood": "!"}}, "<user>hi!<go>"),
        ({"add_generation_prompt": False}, "<user>hi"),
        ({"truncate_prompt_tokens": 4}, "<go>"),
    ],
)
async def test_what_the_template_reads(http: HttpDoor, pair: Pair, more: dict[str, Any], prompt: str) -> None:
    answer = await http.post(CHAT, {"messages": [USER], "max_tokens": 1, **more})
    assert answer.status == 200
    assert prompt_of(pair[0]) == prompt


async def test_a_chat_fills_the_context_where_nothing_bounds_it(http: HttpDoor, pair: Pair) -> None:
    limit = http.grpc.coordinator.serving.limits.context_limit
    usage = (await http.post(CHAT, {"messages": [USER]})).json["usage"]
    assert usage["total_tokens"] == limit


async def test_wrong_messages_are_named(http: HttpDoor) -> None:
    role = await http.post(CHAT, {"messages": [USER, {"role": "", "content": "x"}]})
    none = await http.post(CHAT, {"messages": []})
    top = await http.post(CHAT, {"messages": [USER], "logprobs": True, "top_logprobs": 99})
    assert [a.status for a in (role, none, top)] == [400, 400, 400]
    assert [a.error["param"] for a in (role, none, top)] == ["messages[1].role", "messages", "top_logprobs"]


async def test_the_tokens_of_a_chat_are_those_that_it_is_sent_with(http: HttpDoor) -> None:
    answer = await http.post("/tokenize", {"messages": [USER], "tools": [{"a": 1}]})
    assert bytes(answer.json["tokens"]).decode() == '<user>hi[[{"a": 1}]]<go>'


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
async def test_variables_that_replace_the_messages_are_refused_by_name(http: HttpDoor, pair: Pair, path: str) -> None:
    answer = await http.post(path, {"messages": [USER], "chat_template_kwargs": {"messages": []}})
    assert (answer.status, answer.json["error"]["param"]) == (400, "chat_template_kwargs")
