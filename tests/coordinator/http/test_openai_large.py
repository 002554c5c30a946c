"""Large bodies of /tokenize, /detokenize and chats over the OpenAI door: whole answers, or refused before the work."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.http_door import HttpDoor

from coordinator.http.parsing import schema_text
from coordinator.http.prompts import messages_of
from coordinator.http.tokens import answer_of
from kvrelay.errors import InvalidArgument


def called(*arguments: str) -> list[dict[str, Any]]:
    """A chat with one call of a tool in each message."""
    return [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": one}}]} for one in arguments]


@pytest.mark.parametrize("count", [0, 1, 65_536, 65_537, 150_000])
def test_an_answer_in_pieces_is_the_json_of_the_whole(count: int) -> None:
    ids = list(range(count))
    assert answer_of(ids, 64) == json.dumps({"count": count, "max_model_len": 64, "tokens": ids})


async def test_the_longest_prompt_is_tokenized_and_a_longer_one_refused(http: HttpDoor) -> None:
    answer = await http.post("/tokenize", {"prompt": "a" * 2**20})
    assert (answer.json["count"], set(answer.json["tokens"])) == (2**20, {97})
    answer = await http.post("/tokenize", {"prompt": "a" * (2**20 + 1)})
    assert (answer.status, answer.json["error"]["param"]) == (400, "prompt")


async def test_a_bad_token_far_behind_is_named(http: HttpDoor) -> None:
    answer = await http.post("/detokenize", {"tokens": [97] * 200_000})
    assert answer.json == {"prompt": "a" * 200_000}
    answer = await http.post("/detokenize", {"tokens": [97] * 200_000 + [258]})
    assert (answer.status, answer.json["error"]["param"]) == (400, "tokens[200000]")


def test_arguments_of_calls_are_counted_before_they_are_parsed() -> None:
    (message,) = messages_of(called('{"a": 1}'))
    assert message["tool_calls"] == [{"function": {"name": "f", "arguments": {"a": 1}}}]
    assert len(messages_of(called(*["{}"] * 1024))) == 1024
    for arguments in (["{"] * 1025, ["[" * 2**17, "[" * 2**17 + "["]):
        with pytest.raises(InvalidArgument, match="messages: at most") as info:
            messages_of(called(*arguments))
        assert info.value.field == "messages"


def test_a_schema_in_a_string_is_measured_before_it_is_parsed() -> None:
    with pytest.raises(InvalidArgument, match="guided_json: must be at most 65536 bytes of UTF-8, not 65537"):
        schema_text("guided_json", "[" * 65_537)
