"""How fast blocks move between two processes as frames of a link, the grpc transport. Knows no tickets' states.

`python -m worker.link_probe` writes and reads in two processes of its own and prints one JSON object.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import statistics
import time
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from typing import Any

from kvrelay.link import BlockData, LandedNotice, PartManifest
from kvrelay.requests import Incarnation
from kvrelay.rpc.convert import to_decode_from_proto, to_prefill_to_proto
from kvrelay.rpc.server import RpcServer
from kvrelay.v1 import link_pb2, link_pb2_grpc
from kvtransfer.probe import BLOCK_BYTES, PROBED_BLOCKS, PROBED_ROUNDS, READER, ProbePool
from kvtransfer.transports.base import Part, WriteFailed
from kvtransfer.transports.grpc import GrpcTransport
from worker.wire import dial_link

ROUND_TIMEOUT_S = 30.0
COUNT_S = 0.7
"""No more rounds of one count after this long, as long as there is one beside the first, which warms up."""


class Sink(link_pb2_grpc.LinkServiceServicer):
    """Writes each block where its position says, and answers a manifest with LandedNotice."""

    def __init__(self, pool: ProbePool) -> None:
        self._pool = pool

    async def Link(  # type: ignore[override]  # the generated base mixes sync and async handlers
        self, request_iterator: AsyncIterator[link_pb2.LinkRequest], context: Any
    ) -> None:
        async for request in request_iterator:
            message = to_decode_from_proto(request)
            if isinstance(message, BlockData):
                self._pool.write(message.position, message.offset, message.data)
            elif isinstance(message, PartManifest):
                await context.write(to_prefill_to_proto(LandedNotice(1)))


def receive(pipe: Connection, num_blocks: int, block_bytes: int) -> None:
    """The reading process: sends the port it serves on, and ends when told to or with its writer."""
    asyncio.run(_serve(pipe, num_blocks, block_bytes))


async def _serve(pipe: Connection, num_blocks: int, block_bytes: int) -> None:
    server = RpcServer()
    sink = Sink(ProbePool(num_blocks, block_bytes))
    server.add(link_pb2_grpc.add_LinkServiceServicer_to_server, sink, "kvrelay.v1.LinkService")
    pipe.send(server.bind("127.0.0.1:0"))
    await server.start()
    await asyncio.to_thread(_wait, pipe)
    await server.stop(0.0)


def _wait(pipe: Connection) -> None:
    try:
        pipe.recv()
    except EOFError:
        return


async def probe(port: int, counts: tuple[int, ...], rounds: int, block_bytes: int) -> list[dict[str, float]]:
    """One row a count: medians of the seconds from post to the notice that all has landed. At most `rounds` of each."""
    loop = asyncio.get_running_loop()
    async with dial_link(f"127.0.0.1:{port}") as call:

        def send(_peer: Incarnation, message: BlockData | PartManifest) -> None:
            asyncio.run_coroutine_threadsafe(call.write(message), loop).result(ROUND_TIMEOUT_S)

        failures: list[WriteFailed] = []

        def note(event: object) -> None:
            if isinstance(event, WriteFailed):
                failures.append(event)

        transport = GrpcTransport(ProbePool(max(counts), block_bytes), send, on_event=note)
        landed = call.messages()
        rows = []
        for count in counts:
            ids = tuple(range(count))
            seconds: list[float] = []
            ends_at = time.monotonic() + COUNT_S
            while len(seconds) < rounds + 1 and (len(seconds) < 2 or time.monotonic() < ends_at):
                begun = time.perf_counter()
                transport.post(Part(READER, 1, len(seconds), ids, ids, ids, b"manifest"))
                await asyncio.wait_for(anext(landed), ROUND_TIMEOUT_S)
                seconds.append(time.perf_counter() - begun)
            median = statistics.median(seconds[1:])
            rate = count * block_bytes / median / 1e9
            rows.append({"blocks": count, "write_s": median, "best_s": min(seconds[1:]), "gb_per_s": rate})
        await asyncio.to_thread(transport.close)
        if failures:
            raise RuntimeError(f"a write failed: {failures[0]}")
        return rows


def main() -> None:
    context = multiprocessing.get_context("spawn")
    pipe, child = context.Pipe()
    reader = context.Process(target=receive, args=(child, max(PROBED_BLOCKS), BLOCK_BYTES), daemon=True)
    reader.start()
    child.close()
    rows = asyncio.run(probe(pipe.recv(), PROBED_BLOCKS, PROBED_ROUNDS, BLOCK_BYTES))
    pipe.send(None)
    reader.join(10)
    print(json.dumps({"block_bytes": BLOCK_BYTES, "rows": rows}))


if __name__ == "__main__":
    main()
