"""A plain HTTP/1.1 client over asyncio streams, for tests of the OpenAI door: it can stop reading and hang up."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

READ_S = 10.0
EVENT = b"data: "


@dataclass
class Answer:
    """headers: lower-case names."""

    status: int
    headers: dict[str, str]
    body: bytes = b""

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = self.json["error"]
        return error

    @property
    def events(self) -> list[Any]:
        """What each event says: an object, or the text [DONE]."""
        lines = [part.removeprefix(EVENT) for part in self.body.split(b"\n\n") if part]
        return [line.decode() if line == b"[DONE]" else json.loads(line) for line in lines]


class Wire:
    """One connection. `ask` and `read` may be called again and again on it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def ask(self, path: str, body: Any = None, method: str = "POST", **headers: str) -> None:
        """body: bytes as they are, all else as JSON."""
        raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        given = {
            "host": "test",
            "content-length": str(len(raw)),
            **{k.replace("_", "-"): v for k, v in headers.items()},
        }
        head = "".join(f"{name}: {value}\r\n" for name, value in given.items())
        self.writer.write(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + raw)

    async def head(self) -> Answer:
        """Status and headers."""
        async with asyncio.timeout(READ_S):
            lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) if i else ("", "") for i, line in enumerate(lines) if line and i)
        return Answer(int(lines[0].split()[1]), headers)

    async def chunk(self) -> bytes:
        """The next piece of a body of unknown length; empty at its end."""
        async with asyncio.timeout(READ_S):
            size = int((await self.reader.readline()).strip(), 16)
            return (await self.reader.readexactly(size + 2))[:-2]

    async def read(self) -> Answer:
        """A whole answer."""
        answer = await self.head()
        if "content-length" in answer.headers:
            async with asyncio.timeout(READ_S):
                answer.body = await self.reader.readexactly(int(answer.headers["content-length"]))
            return answer
        while piece := await self.chunk():
            answer.body += piece
        return answer

    async def hang_up(self, *, reset: bool = False) -> None:
        """Closes the connection, in order or at once."""
        if reset:
            self.writer.transport.abort()
        else:
            self.writer.close()
        with suppress(OSError):
            await self.writer.wait_closed()


@asynccontextmanager
async def wire_to(address: str, limit: int = 2**16) -> AsyncIterator[Wire]:
    """address: HOST:PORT."""
    host, _, port = address.rpartition(":")
    wire = Wire(*await asyncio.open_connection(host, int(port), limit=limit))
    try:
        yield wire
    finally:
        await wire.hang_up(reset=True)


async def asked(address: str, path: str, body: Any = None, method: str = "POST", **headers: str) -> Answer:
    """One request on a connection of its own."""
    async with wire_to(address) as wire:
        wire.ask(path, body, method, **headers)
        return await wire.read()


async def small_window(address: str) -> Wire:
    """A client whose kernel takes little for it."""
    host, _, port = address.rpartition(":")
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
    return Wire(*await asyncio.open_connection(sock=sock, limit=1024))
