"""One client process of bench/doors.py: opens streams as it is told on stdin, one JSON order a line, and counts tokens.

The first line is the set-up: target and http; it answers `ready`. Order: {"door": "grpc" or "http", "streams": N,
"tokens": T}; all N streams are opened at once. Answer: one line, how many tokens came. Nothing is parsed more than that
takes, so that the client does not become what is measured.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable

import grpc

from kvrelay.client.request import GENERATE, generate_request
from kvrelay.rpc.channel import open_channel
from kvrelay.rpc.process import settle

PROMPT = "Say something, and then say it again."
BUFFER = 2**16
AROUND = 2
"""Messages of a gRPC stream that are no tokens: Accepted and Finished."""


async def over_grpc(channel: grpc.aio.Channel, tokens: int) -> int:
    options = {"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
    messages = 0
    async for _ in channel.unary_stream(GENERATE)(generate_request(PROMPT, options).SerializeToString()):
        messages += 1
    return messages - AROUND


async def over_http(http: str, tokens: int) -> int:
    address = http.removeprefix("http://")
    host, _, port = address.rpartition(":")
    body = json.dumps(
        {"prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    ).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(head.encode() + body)
    parts = []
    while part := await reader.read(BUFFER):
        parts.append(part)
    writer.close()
    return b"".join(parts).count(b'"finish_reason":null')


async def main() -> None:
    setup = json.loads(sys.stdin.readline())
    loop = asyncio.get_running_loop()
    async with open_channel(setup["target"]) as channel:
        doors: dict[str, Callable[[int], Awaitable[int]]] = {
            "grpc": lambda tokens: over_grpc(channel, tokens),
            "http": lambda tokens: over_http(setup["http"], tokens),
        }
        settle()
        print("ready", flush=True)
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            order = json.loads(line)
            counts = await asyncio.gather(*(doors[order["door"]](order["tokens"]) for _ in range(order["streams"])))
            print(sum(counts), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
