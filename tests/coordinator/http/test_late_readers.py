"""Handlers that come late: to the first token, and to each one after it. No token is lost, doubled or out of order."""

from __future__ import annotations

import asyncio
from itertools import count
from typing import Any

import pytest
from support.fake_workers import FakeWorker
from support.http_door import HttpDoor

from coordinator.stream import Item, StreamBuffer

STREAMS = 16
TOKENS = 60
IDS = [97 + i % 26 for i in range(TOKENS)]
TEXT = bytes(IDS).decode()


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> dict[StreamBuffer, int]:
    """Other things have their turns before each item is taken. By stream, the most items that waited."""
    most: dict[StreamBuffer, int] = {}
    take, turns = StreamBuffer.take, count()

    async def late(self: StreamBuffer) -> Item:
        for _ in range(20 + next(turns) % 7):
            await asyncio.sleep(0)
        most[self] = max(most.get(self, 0), len(self._items))
        return await take(self)

    monkeypatch.setattr(StreamBuffer, "take", late)
    return most


async def over_grpc(http: HttpDoor, **fields: Any) -> None:
    answer = await http.grpc.ask(text="hello", max_tokens=TOKENS, **fields)
    assert answer.error is None
    assert (answer.ids, answer.text) == (IDS, TEXT)


async def over_http(http: HttpDoor, streams: bool) -> None:
    answer = await http.post("/v1/completions", {"prompt": "hello", "max_tokens": TOKENS, "stream": streams})
    assert answer.status == 200
    if not streams:
        assert answer.json["choices"][0]["text"] == TEXT
        return
    *events, done = answer.events
    assert done == "[DONE]"
    assert [event["choices"][0]["text"] for event in events] == [*TEXT, ""]


@pytest.mark.parametrize("how", ["grpc", "http stream", "http whole"])
async def test_what_queues_up_before_the_handler_comes_is_all_written_in_order(
    http: HttpDoor, pair: tuple[FakeWorker, FakeWorker], waiting: dict[StreamBuffer, int], how: str
) -> None:
    ask = [over_grpc(http) if how == "grpc" else over_http(http, how == "http stream") for _ in range(STREAMS)]
    await asyncio.gather(*ask)
    await http.grpc.idle()
    assert len(waiting) == STREAMS
    assert max(waiting.values()) > 1, "no handler was ever late"
