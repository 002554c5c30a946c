"""Prompts of megabytes: the loop that writes everybody's tokens is never held for long by one of them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.door import Door, until
from support.fake_workers import FakeWorker
from support.holds import holds

from kvrelay.errors import InvalidArgument
from kvrelay.session import Prefill, Start
from kvrelay.v1 import inference_pb2

LONGEST_HOLD_S = 0.25
IDS = [i % 250 for i in range(1_500_000)]
TEXT = "some words, and so on. " * (5_000_000 // 23)
REFUSED: dict[str, dict[str, Any]] = {
    "text of 5 MB": {"text": TEXT},
    "1.5 million ids": {"tokens": {"ids": IDS}},
    "a bad id among the last of 1.5 million": {"tokens": {"ids": [*IDS, -1]}, "truncate_prompt": 1000},
}
TAKEN: dict[str, dict[str, Any]] = {
    "text of 5 MB": {"text": TEXT},
    "text of 5 MB beyond ASCII": {"text": "é" * 2_500_000},
    "1.5 million ids": {"tokens": {"ids": IDS}},
}


@pytest.mark.parametrize("name", REFUSED)
async def test_a_prompt_far_too_long_is_refused_without_a_hold(
    door: Door, pair: tuple[FakeWorker, FakeWorker], name: str
) -> None:
    request = inference_pb2.GenerateRequest(**REFUSED[name])
    async with holds() as seen:
        with pytest.raises(Exception, match=r"a prompt has 1 \.\. 1023|must be 0 \.\. 257, not -1"):
            async for _ in door.stub.Generate(request):
                pass
    assert max(seen) < LONGEST_HOLD_S
    assert pair[0].commands(Prefill) == []


@pytest.mark.parametrize("name", TAKEN)
async def test_a_long_prompt_that_is_truncated_holds_no_neighbour(
    door: Door, pair: tuple[FakeWorker, FakeWorker], name: str
) -> None:
    pair[1].step_s = 0.005
    beside = asyncio.ensure_future(door.ask(text="good", max_tokens=100))
    await until(lambda: pair[1].commands(Start))
    request = inference_pb2.GenerateRequest(**TAKEN[name], truncate_prompt=1000, max_tokens=2)
    async with holds() as seen:
        messages = [message async for message in door.stub.Generate(request)]
        assert (await beside).ids == [97 + i % 26 for i in range(100)]
    assert max(seen) < LONGEST_HOLD_S
    assert messages[0].accepted.prompt_tokens == 1000
    ids = IDS if "ids" in name else list(str(TAKEN[name]["text"]).encode())
    assert pair[0].commands(Prefill)[-1].work.token_ids == tuple(ids[-1000:])


async def test_ids_that_are_left_out_are_not_judged_and_those_behind_are_named_as_sent(
    door: Door, pair: tuple[FakeWorker, FakeWorker]
) -> None:
    answer = await door.ask(tokens={"ids": [-1] * 5000 + [1, 999, 1]}, truncate_prompt=3)
    assert isinstance(answer.error, InvalidArgument)
    assert answer.error.field == "tokens.ids[5001]"
    assert (await door.ask(tokens={"ids": [-1] * 5000 + [1]}, truncate_prompt=1, max_tokens=1)).error is None
