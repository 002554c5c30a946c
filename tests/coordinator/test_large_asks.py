"""Tokenize, Detokenize and chats with much JSON: counted before anything is copied or parsed."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

import pytest
from grpc.aio import AioRpcError
from support.door import Door
from support.fake_workers import FakeWorker
from support.holds import holds

from coordinator.raw import Limits, RawRequest
from coordinator.request_wire import raw_request
from coordinator.service import tokenize_response
from coordinator.validate import MAX_JSON_LENGTH, MAX_JSON_TEXTS, MAX_TEXT_BYTES, MAX_TOKEN_IDS, check
from kvrelay.errors import InvalidArgument
from kvrelay.rpc.status import from_rpc_error
from kvrelay.v1 import inference_pb2

LONGEST_HOLD_S = 0.25
LIMITS = Limits("hash", 258, 1024, (256,), has_chat_template=True)


async def refused(call: Awaitable[Any]) -> InvalidArgument:
    with pytest.raises(AioRpcError) as info:
        await call
    error = from_rpc_error(info.value)
    assert isinstance(error, InvalidArgument)
    return error


async def test_the_longest_text_is_tokenized_without_a_hold(door: Door) -> None:
    async with holds() as seen:
        answer = await door.stub.Tokenize(inference_pb2.TokenizeRequest(text="é" * (MAX_TEXT_BYTES // 2)))
    assert (len(answer.token_ids), answer.token_ids[0], answer.token_ids[-1]) == (MAX_TEXT_BYTES, 0xC3, 0xA9)
    assert max(seen) < LONGEST_HOLD_S


async def test_a_longer_text_is_refused_unread(door: Door) -> None:
    for text in ("a" * (MAX_TEXT_BYTES + 1), "é" * (MAX_TEXT_BYTES // 2 + 1)):
        assert (await refused(door.stub.Tokenize(inference_pb2.TokenizeRequest(text=text)))).field == "text"


async def test_the_longest_list_becomes_text_without_a_hold(door: Door) -> None:
    request = inference_pb2.DetokenizeRequest(token_ids=[97, 98] * (MAX_TOKEN_IDS // 2))
    async with holds() as seen:
        assert (await door.stub.Detokenize(request)).text == "ab" * (MAX_TOKEN_IDS // 2)
    assert max(seen) < LONGEST_HOLD_S


async def test_a_bad_id_at_the_end_of_the_longest_list_is_named(door: Door) -> None:
    request = inference_pb2.DetokenizeRequest(token_ids=[97] * (MAX_TOKEN_IDS - 1) + [258])
    assert (await refused(door.stub.Detokenize(request))).field == f"token_ids[{MAX_TOKEN_IDS - 1}]"


async def test_of_a_longer_list_not_one_id_is_looked_at(door: Door) -> None:
    request = inference_pb2.DetokenizeRequest(token_ids=[999] * 1_500_000)
    async with holds() as seen:
        error = await refused(door.stub.Detokenize(request))
    assert (error.field, error.message) == ("token_ids", f"token_ids: at most {MAX_TOKEN_IDS} ids, not 1500000")
    assert max(seen) < LONGEST_HOLD_S


@pytest.mark.parametrize("count", [0, 1, 65_535, 65_536, 65_537, 200_000])
def test_an_answer_in_pieces_has_all_ids(count: int) -> None:
    assert list(tokenize_response(list(range(count))).token_ids) == list(range(count))


def read(*messages: str, **more: str) -> RawRequest:
    """A chat as a door reads it. messages: what further keys each has."""
    said = [inference_pb2.ChatMessage(role="user", content="x", extra_json=extra) for extra in messages or ("",)]
    chat = inference_pb2.ChatMessages(messages=said, **more)
    return raw_request(inference_pb2.GenerateRequest(chat=chat), LIMITS)


def test_json_of_a_chat_is_counted_before_it_is_parsed() -> None:
    with pytest.raises(InvalidArgument, match=f"chat: at most {MAX_JSON_LENGTH} characters of JSON, not 262145"):
        read(tools_json="[" * (MAX_JSON_LENGTH + 1))
    with pytest.raises(InvalidArgument, match=f"chat: at most {MAX_JSON_LENGTH}"):
        read("{" * 2**17, tools_json="[" * 2**16, template_json="{" * 2**16 + "{")
    assert read(tools_json=f"[{' ' * (MAX_JSON_LENGTH - 2)}]").tools == []


def test_so_many_messages_have_json_and_any_others_none() -> None:
    raw = read(*['{"a": 1}'] * MAX_JSON_TEXTS, *[""] * (8192 - MAX_JSON_TEXTS))
    assert raw.chat is not None
    assert (len(raw.chat), raw.chat[MAX_JSON_TEXTS - 1]["a"], "a" in raw.chat[-1]) == (8192, 1, False)
    with pytest.raises(InvalidArgument, match="chat: at most 1024 messages or calls with JSON of their own, not 1025"):
        read(*["{"] * (MAX_JSON_TEXTS + 1))


@pytest.mark.parametrize(
    "name", ["messages", "tools", "raise_exception", "bos_token", "eos_token", "unk_token", "pad_token"]
)
def test_variables_of_a_template_replace_nothing_that_is_judged_elsewhere(name: str) -> None:
    with pytest.raises(InvalidArgument, match=f"must not have '{name}'") as info:
        check(read(template_json=f'{{"x": 1, "{name}": []}}'), LIMITS)
    assert info.value.field == "chat.template_json"


def test_other_variables_of_a_template_are_free() -> None:
    raw = read(template_json='{"add_generation_prompt": false, "documents": [], "enable_thinking": true}')
    check(raw, LIMITS)
    assert raw.template_variables == {"add_generation_prompt": False, "documents": [], "enable_thinking": True}


async def test_the_costliest_json_of_a_chat_holds_nobody(door: Door, pair: tuple[FakeWorker, FakeWorker]) -> None:
    for json in (
        "[" + "{}," * (MAX_JSON_LENGTH // 3 - 2) + "{}]",
        "[" + '{"a":{}},' * (MAX_JSON_LENGTH // 9 - 2) + "{}]",
    ):
        async with holds() as seen:
            answer = await door.ask(chat={"messages": [{"role": "user"}], "tools_json": json})
        assert isinstance(answer.error, InvalidArgument)  # this model has no template
        assert answer.error.field == "chat"
        assert max(seen) < LONGEST_HOLD_S
