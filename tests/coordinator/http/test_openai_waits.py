"""What a call over the OpenAI door may wait for, ended by its client or its deadline, also before it is taken in."""

from __future__ import annotations

import asyncio
import time

import pytest
from support.door import held, slow_tokenizer, until
from support.fake_workers import FakeWorker
from support.http_client import small_window, wire_to
from support.http_door import HttpDoor

from coordinator.http import calls, connection
from coordinator.http.connection import MAX_AHEAD
from coordinator.stream import TokenItem
from coordinator.text import LONG_TEXT
from kvrelay.errors import Unavailable
from kvrelay.session import Abort, Prefill, Reserve

Pair = tuple[FakeWorker, FakeWorker]
COMPLETIONS = "/v1/completions"
LONG = {"prompt": "x" * LONG_TEXT, "truncate_prompt_tokens": 8, "max_tokens": 2}
"""Its text is tokenized in the thread."""


async def left_everything(http: HttpDoor) -> None:
    await http.grpc.idle()
    await asyncio.wait_for(http.server.door.wait_idle(), 2)


async def test_a_hang_up_while_the_prompt_is_tokenized_ends_the_call(
    http: HttpDoor, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    with slow_tokenizer(monkeypatch) as begun:
        async with wire_to(http.address) as wire:
            wire.ask(COMPLETIONS, LONG)
            await until(begun.is_set)
            await wire.hang_up()
            await left_everything(http)
    assert (http.grpc.counters["started"], pair[1].commands(Reserve)) == (0, [])


async def test_a_hang_up_in_the_queue_never_reaches_a_worker(http: HttpDoor, pair: Pair) -> None:
    held(pair[1], "reserve")
    dispatcher = http.grpc.coordinator.dispatcher
    async with wire_to(http.address) as first, wire_to(http.address) as second:
        first.ask(COMPLETIONS, {"prompt": "x" * 900, "max_tokens": 2})
        await until(lambda: pair[1].commands(Reserve))
        second.ask(COMPLETIONS, {"prompt": "y" * 900, "max_tokens": 2})
        await until(lambda: dispatcher.num_queued == 1)
        await second.hang_up()
        await until(lambda: dispatcher.num_queued == 0, 2.0)
        pair[1].let_go("reserve")
        assert (await first.read()).status == 200
    await left_everything(http)
    assert (http.grpc.counters["outcome.Cancelled"], len(pair[1].commands(Reserve))) == (1, 1)


@pytest.mark.parametrize("reset", [True, False])
async def test_a_hang_up_ends_the_request_also_behind_others_that_were_sent_meanwhile(
    http: HttpDoor, pair: Pair, reset: bool
) -> None:
    held(pair[0], "token0")
    async with wire_to(http.address) as wire:
        wire.ask(COMPLETIONS, {"prompt": "a", "max_tokens": 5})
        await until(lambda: pair[0].commands(Prefill))
        (server_side,) = http.server._server.server_state.connections
        for waiting in range(1, MAX_AHEAD + 1):
            wire.ask(COMPLETIONS, {"prompt": "b", "max_tokens": 5})
            await until(lambda waiting=waiting: len(server_side.pipeline) == waiting)
        await wire.hang_up(reset=reset)
        await until(lambda: pair[0].commands(Abort), 2.0)
    await left_everything(http)
    pair[0].let_go("token0")
    assert len(pair[0].commands(Prefill)) == 1


@pytest.mark.parametrize("most_bytes", [connection.MAX_AHEAD_BYTES, 1000])
async def test_of_what_is_sent_ahead_no_more_is_read_than_is_allowed_and_all_is_answered(
    http: HttpDoor, pair: Pair, monkeypatch: pytest.MonkeyPatch, most_bytes: int
) -> None:
    monkeypatch.setattr(connection, "MAX_AHEAD_BYTES", most_bytes)
    held(pair[0], "token0")
    async with wire_to(http.address) as wire:
        wire.ask(COMPLETIONS, {"prompt": "a", "max_tokens": 1})
        await until(lambda: pair[0].commands(Prefill))
        (server_side,) = http.server._server.server_state.connections
        number = 0
        while not server_side.flow.read_paused:
            number += 1
            wire.ask(COMPLETIONS, {"prompt": "b" * 200, "max_tokens": 1})
            await until(lambda number=number: len(server_side.pipeline) == number)
        assert number == (MAX_AHEAD + 1 if most_bytes > 1000 else 4)
        wire.ask("/health", method="GET")
        pair[0].let_go("token0")
        answers = [await wire.read() for _ in range(number + 2)]
    assert [a.json["usage"]["prompt_tokens"] for a in answers[:-1]] == [1, *[200] * number]
    assert (answers[-1].status, answers[-1].body) == (200, b"")


@pytest.mark.parametrize("path", [COMPLETIONS, "/tokenize"])
async def test_a_deadline_that_passes_while_the_prompt_is_tokenized_is_told_then(
    http: HttpDoor, pair: Pair, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    with slow_tokenizer(monkeypatch) as begun:
        began = time.monotonic()
        late = await http.post(path, LONG, x_request_timeout="0.3")
        assert begun.is_set()
        assert (late.status, late.error["code"]) == (504, "deadline_exceeded")
        assert 0.3 <= time.monotonic() - began < 2.0
        await left_everything(http)
    assert (http.grpc.counters["started"], pair[1].commands(Reserve)) == (0, [])


async def test_a_deadline_that_passes_before_the_body_is_whole_is_told_then(http: HttpDoor, pair: Pair) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-request-timeout: 0.2\r\ncontent-length: 100\r\n\r\n{"
    async with wire_to(http.address) as wire:
        wire.writer.write(head)
        late = await wire.read()
        assert (late.status, late.error["code"]) == (504, "deadline_exceeded")
    await left_everything(http)


async def test_deadlines_that_pass_in_the_queue_reach_no_worker(http: HttpDoor, pair: Pair) -> None:
    held(pair[1], "reserve")
    async with wire_to(http.address) as first:
        first.ask(COMPLETIONS, {"prompt": "x" * 900, "max_tokens": 2})
        await until(lambda: pair[1].commands(Reserve))
        asked = [http.post(COMPLETIONS, {"prompt": "y" * 900}, x_request_timeout="0.5") for _ in range(20)]
        assert {(a.status, a.error["code"]) for a in await asyncio.gather(*asked)} == {(504, "deadline_exceeded")}
        assert http.grpc.coordinator.dispatcher.num_queued == 0
        pair[1].let_go("reserve")
        assert (await first.read()).status == 200
    await left_everything(http)
    assert len(pair[1].commands(Reserve)) == 1


async def test_a_client_that_does_not_read_the_error_that_ends_its_stream_is_cut_off(
    http: HttpDoor, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its write is not that of a token, so nobody else looks at how long it takes."""
    monkeypatch.setattr(calls, "READ_S", 0.2)
    held(pair[1], "decode")
    dispatcher = http.grpc.coordinator.dispatcher
    wire = await small_window(http.address)
    wire.ask(COMPLETIONS, {"prompt": "x", "max_tokens": 900, "stream": True})
    await wire.head()
    (server_side,) = http.server._server.server_state.connections
    (stream,) = dispatcher._open.values()
    while not server_side.flow.write_paused:
        stream.put(TokenItem(1, 97, "y" * 20_000, 0.0))
        await until(lambda: not stream._items and stream.stuck_s(time.monotonic()) == 0)
    dispatcher.end_all(Unavailable("over"))
    await left_everything(http)
    assert not http.server._server.server_state.connections
    await wire.hang_up(reset=True)
    pair[1].let_go("decode")
