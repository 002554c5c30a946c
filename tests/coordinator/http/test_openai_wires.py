"""What a client may do with its connection to the OpenAI door: heads of a size and in time, HTTP/1.0, how many."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack

import pytest
from support.door import until
from support.fake_workers import FakeWorker
from support.http_client import Answer, Wire, wire_to
from support.http_door import HttpDoor

from coordinator.http import connection

Pair = tuple[FakeWorker, FakeWorker]
COMPLETIONS = "/v1/completions"
HEALTH = b"GET /health HTTP/1.1\r\nhost: test\r\n"
K64 = connection.MAX_HEAD_BYTES


async def rest(wire: Wire) -> bytes:
    """All that comes until the server closes."""
    async with asyncio.timeout(10):
        return await wire.reader.read(-1)


async def refused(wire: Wire) -> Answer:
    """An answer after which the connection ends."""
    answer = await wire.read()
    assert answer.headers["connection"] == "close"
    assert await rest(wire) == b""
    return answer


@pytest.mark.parametrize(
    "head",
    [
        b"GET /" + b"a" * K64 + b" HTTP/1.1\r\nhost: test\r\n\r\n",
        HEALTH + b"x: " + b"a" * K64 + b"\r\n\r\n",
        HEALTH + b"x: " + b"a" * (K64 + 1),
        HEALTH + (b"x: " + b"a" * 8192 + b"\r\n") * 9,
        HEALTH + b"x: y\r\n" * 200 + b"\r\n",
        HEALTH + b"x: y\r\n" * 30_000,
    ],
)
async def test_a_request_whose_head_is_too_large_is_refused_and_its_connection_closed(
    http: HttpDoor, head: bytes
) -> None:
    async with wire_to(http.address) as wire:
        wire.writer.write(head)
        answer = await refused(wire)
        assert (answer.status, answer.error["code"]) == (431, "headers_too_large")


@pytest.mark.parametrize("trailers", [b"x: y\r\n" * 202, b"x: " + b"a" * (K64 + 1)])
async def test_a_trailer_that_is_too_large_ends_the_connection(http: HttpDoor, trailers: bytes) -> None:
    async with wire_to(http.address) as wire:
        wire.writer.write(b"POST /health HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\n")
        assert (await wire.read()).status == 405
        wire.writer.write(trailers)
        assert await rest(wire) == b""


async def test_a_head_without_an_end_is_refused_once_it_is_too_large(http: HttpDoor) -> None:
    async with wire_to(http.address) as wire:
        wire.writer.write(HEALTH + b"x: ")
        for _ in range(16):
            wire.writer.write(b"a" * 4097)
            await wire.writer.drain()
            await asyncio.sleep(0.001)  # in reads of their own
        assert (await refused(wire)).status == 431


async def test_a_head_of_the_size_that_is_allowed_is_taken(http: HttpDoor, pair: Pair) -> None:
    async with wire_to(http.address) as wire:
        for _ in range(3):
            wire.writer.write(HEALTH + (b"x: " + b"a" * 325 + b"\r\n") * 199 + b"\r\n")
            assert (await wire.read()).status == 200


async def test_what_is_no_http_is_refused_in_openais_shape(http: HttpDoor) -> None:
    async with wire_to(http.address) as wire:
        wire.writer.write(b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n")
        answer = await refused(wire)
        assert (answer.status, answer.error["type"]) == (400, "invalid_request_error")


async def test_a_head_that_does_not_come_in_time_is_given_up(http: HttpDoor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_S", 0.1)
    async with wire_to(http.address) as silent, wire_to(http.address) as slow, wire_to(http.address) as second:
        slow.writer.write(HEALTH)
        second.ask("/health", method="GET")
        assert (await second.read()).status == 503
        await asyncio.sleep(0.2)  # an idle connection that had a request is not a head that is late
        second.ask("/health", method="GET")
        assert (await second.read()).status == 503
        second.writer.write(HEALTH)
        assert await rest(silent) == b""
        assert (await refused(slow)).status == 408
        assert (await refused(second)).status == 408


async def test_a_connection_too_many_is_told_when_to_come_again(
    http: HttpDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "MAX_CONNECTIONS", 2)
    open_ones = http.server._server.server_state.connections
    async with wire_to(http.address), wire_to(http.address) as second:
        await until(lambda: len(open_ones) == 2)
        async with wire_to(http.address) as third:
            answer = await refused(third)
            assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        second.ask("/version", method="GET")
        assert (await second.read()).status == 200
    await until(lambda: not open_ones)


async def test_http_1_0_gets_events_without_chunks_until_its_connection_closes(http: HttpDoor, pair: Pair) -> None:
    body = json.dumps({"prompt": ["ab", "cd"], "n": 2, "max_tokens": 2, "stream": True}).encode()
    async with wire_to(http.address) as wire:
        wire.writer.write(b"POST /v1/completions HTTP/1.0\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        answer = await wire.head()
        assert "transfer-encoding" not in answer.headers
        assert answer.headers["connection"] == "close"
        answer.body = await rest(wire)
    assert answer.events[-1] == "[DONE]"
    assert len(answer.events) == 4 * 3 + 1


async def test_http_1_0_gets_a_whole_answer_of_known_length(http: HttpDoor, pair: Pair) -> None:
    body = json.dumps({"prompt": "ab", "max_tokens": 2}).encode()
    async with wire_to(http.address) as wire:
        wire.writer.write(b"POST /v1/completions HTTP/1.0\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        assert (await refused(wire)).json["choices"][0]["text"] == "ab"


async def test_bodies_that_come_at_once_share_a_budget(http: HttpDoor, monkeypatch: pytest.MonkeyPatch) -> None:
    door = http.server.door
    monkeypatch.setattr(door, "max_body_bytes", 1000)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: test\r\ncontent-length: 1000\r\n\r\n"
    async with AsyncExitStack() as stack:
        wires = [await stack.enter_async_context(wire_to(http.address)) for _ in range(32)]
        for wire in wires:
            wire.writer.write(head + b" " * 999)
        await until(lambda: door._num_coming == 32 * 999)
        refused = await http.post(COMPLETIONS, b"x" * 33)
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        await wires[0].hang_up()
        await until(lambda: door._num_coming == 31 * 999)
        assert (await http.post(COMPLETIONS, b"x" * 33)).status == 400
        wires[1].writer.write(b" ")
        assert (await wires[1].read()).status == 400
    await until(lambda: door._num_coming == 0)


@pytest.mark.parametrize(
    "path", ["/health", "/version", "/v1/models", "/v1/models/hash", "/v1/models/other", "/metrics"]
)
async def test_head_is_get_without_a_body(http: HttpDoor, path: str) -> None:
    async with wire_to(http.address) as wire:
        wire.ask(path, method="GET")
        whole = await wire.read()
        wire.ask(path, method="HEAD")
        head = await wire.head()
        wire.ask("/version", method="GET")
        assert (await wire.read()).status == 200
    assert (head.status, head.headers["content-length"]) == (whole.status, whole.headers["content-length"])


async def test_a_slash_too_many_is_another_path(http: HttpDoor) -> None:
    """A redirect would take the request to whatever host its headers name."""
    answer = await http.post(f"{COMPLETIONS}/", {"prompt": "x"})
    assert (answer.status, answer.error["code"]) == (404, "not_found")
    assert "location" not in answer.headers


async def test_a_body_in_tiny_chunks_is_taken_little_by_little(
    http: HttpDoor, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, taken = list[int](), connection.Connection.data_received

    def recorded(self: connection.Connection, data: bytes) -> None:
        sizes.append(len(data))
        taken(self, data)

    monkeypatch.setattr(connection.Connection, "data_received", recorded)
    body = json.dumps({"prompt": "ab", "max_tokens": 2, "user": "u" * 50}).encode() + b" " * 40_000
    async with wire_to(http.address) as wire:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: test\r\ntransfer-encoding: chunked\r\n\r\n"
        wire.writer.write(head + b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n")
        assert (await wire.read()).json["choices"][0]["text"] == "ab"
    assert max(sizes) <= connection.READ_BYTES
    assert len(sizes) >= 8
