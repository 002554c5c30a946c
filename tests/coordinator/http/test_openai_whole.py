"""Long whole answers of the OpenAI door: made and written in pieces, the same JSON, given up if nobody reads."""

from __future__ import annotations

import json
import time

import pytest
from support.door import MODEL, until
from support.fake_workers import FakeWorker
from support.http_client import small_window
from support.http_door import HttpDoor

from coordinator.http import calls
from coordinator.http.logprobs import ChatLogprobs, CompletionLogprobs
from coordinator.http.shapes import CHAT, COMPLETION, Answer, Shape, Usage, Whole, whole_answer
from coordinator.stream import TokenItem
from kvrelay.requests import Logprobs

TOP = tuple((token, -token / 8) for token in range(20))
MILLION = 2**20


def gathered(shape: Shape, n: int, tokens: int) -> Whole:
    codec = MODEL.codec
    whole = Whole(shape, 3, n, "", ChatLogprobs(codec) if shape is CHAT else CompletionLogprobs(codec, True))
    for index in range(tokens):
        for sequence in range(n):
            whole.token(TokenItem(index, 97 + sequence, "ab"[sequence], 0.0, sequence, Logprobs(-0.5, TOP)))
    return whole


@pytest.mark.parametrize("shape", [CHAT, COMPLETION])
def test_no_piece_of_a_long_answer_is_long_work(shape: Shape) -> None:
    """Millions of characters, 3,000 tokens a choice: the entries were written as they came."""
    answer, usage = Answer(shape, "id", 7, "m"), Usage(1, 6000, 0)
    pieces, longest = list[str](), 0.0
    making = whole_answer(answer, [gathered(shape, 2, 3000)], usage)
    while True:
        began = time.thread_time()
        piece = next(making, None)
        longest = max(longest, time.thread_time() - began)
        if piece is None:
            break
        pieces.append(piece)
    assert longest < 0.1
    said = json.loads("".join(pieces))
    assert (said["id"], said["model"], said["usage"]) == (f"{shape.prefix}id", "m", usage.as_dict())
    assert [choice["index"] for choice in said["choices"]] == [3, 4]
    for choice, letter in zip(said["choices"], "ab", strict=True):
        logprobs = choice["logprobs"]
        if shape is CHAT:
            assert choice["message"] == {"role": "assistant", "content": letter * 3000, "refusal": None}
            assert len(logprobs["content"]) == 3000
            assert logprobs["content"][2999]["top_logprobs"][1] == {"token": "\x01", "logprob": -0.125, "bytes": [1]}
        else:
            assert choice["text"] == letter * 3000
            assert logprobs["text_offset"] == list(range(3000))
            assert logprobs["top_logprobs"][2999]["\x01"] == -0.125
            assert logprobs["tokens"] == [letter] * 3000


@pytest.mark.parametrize("shape", [CHAT, COMPLETION])
def test_an_answer_without_tokens_is_json_too(shape: Shape) -> None:
    said = json.loads("".join(whole_answer(Answer(shape, "id", 7, "m"), [gathered(shape, 1, 0)], Usage())))
    assert said["choices"][0]["logprobs"] == ({"content": [], "refusal": None} if shape is CHAT else {})


async def test_a_client_that_reads_little_at_a_time_gets_all_of_it(
    http: HttpDoor, pair: tuple[FakeWorker, FakeWorker]
) -> None:
    wire = await small_window(http.address)
    wire.ask("/tokenize", {"prompt": "a" * MILLION})
    answer = await wire.read()
    assert answer.json["count"] == len(answer.json["tokens"]) == MILLION
    wire.ask("/v1/completions", {"prompt": "ab", "max_tokens": 2})
    assert (await wire.read()).json["choices"][0]["text"] == "ab"
    await wire.hang_up()


async def test_a_client_that_does_not_read_a_long_answer_is_cut_off(
    http: HttpDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "READ_S", 0.2)
    wire = await small_window(http.address)
    wire.ask("/tokenize", {"prompt": "a" * MILLION})
    await wire.head()
    await until(lambda: not http.server._server.server_state.connections)
    await http.server.door.wait_idle()
    await wire.hang_up(reset=True)
