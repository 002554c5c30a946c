"""What gRPC's own part of a token costs: a server that does nothing but write ready messages to many streams.

    python bench/doors_floor.py                       256 streams of 200 messages, 3 rounds
    python bench/doors_floor.py --streams 32 --json

The same messages as `bench/doors.py` has, from grpc.aio alone: no coordinator, no workers, no text. That is the floor
of what a token costs the coordinator over gRPC; the rest is ours.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from typing import Any

import grpc

from kvrelay.v1 import inference_pb2

METHOD = "/kvrelay.v1.InferenceService/Generate"
READY_S = 30.0


class Writer(grpc.GenericRpcHandler):
    """Each call gets a message whenever `tick` is called, until it has had so many."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self.queues: list[asyncio.Queue[None]] = []

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        return grpc.unary_stream_rpc_method_handler(self._run, None, lambda message: message.SerializeToString())

    async def _run(self, _: bytes, context: Any) -> None:
        ticks: asyncio.Queue[None] = asyncio.Queue()
        self.queues.append(ticks)
        for index in range(self._tokens):
            await ticks.get()
            message = inference_pb2.GenerateResponse()
            token = message.token
            token.index, token.token_id, token.text, token.offset_s = index, 102, "f", 1.5
            await context.write(message)

    def tick(self) -> None:
        for ticks in self.queues:
            ticks.put_nowait(None)


async def measure(args: argparse.Namespace) -> list[float]:
    """Microseconds of this process's CPU a message, of each round."""
    writer = Writer(args.tokens)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((writer,))
    target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    rounds = []
    for _ in range(args.rounds):
        rounds.append(await one_round(writer, target, args))
        writer.queues.clear()
    await server.stop(0)
    return rounds


async def one_round(writer: Writer, target: str, args: argparse.Namespace) -> float:
    shares = [args.streams * (i + 1) // args.clients - args.streams * i // args.clients for i in range(args.clients)]
    command = [sys.executable, __file__, "--read", target]
    pipe = asyncio.subprocess.PIPE
    readers = [await asyncio.create_subprocess_exec(*command, str(share), stdout=pipe) for share in shares]
    try:
        ends_at = time.monotonic() + READY_S
        while len(writer.queues) < args.streams:
            if time.monotonic() > ends_at:
                raise SystemExit("the streams did not open")
            await asyncio.sleep(0.05)
        used = time.process_time()
        for _ in range(args.tokens):
            writer.tick()
            await asyncio.sleep(args.step_seconds)
        came = [await reader.communicate() for reader in readers]
        if sum(int(out) for out, _ in came) != args.streams * args.tokens:
            raise SystemExit("not every message came")
        return 1e6 * (time.process_time() - used) / (args.streams * args.tokens)
    finally:
        for reader in readers:
            if reader.returncode is None:
                reader.kill()


async def read(target: str, streams: int) -> int:
    """How many messages came over so many streams."""

    async def one() -> int:
        count = 0
        async for _ in channel.unary_stream(METHOD)(b""):
            count += 1
        return count

    async with grpc.aio.insecure_channel(target) as channel:
        return sum(await asyncio.gather(*(one() for _ in range(streams))))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256, help="at once")
    parser.add_argument("--tokens", type=int, default=200, help="of each stream and round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=int, default=2, help="processes that read the streams")
    parser.add_argument("--step-seconds", type=float, default=0.1)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--read", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.read:
        print(asyncio.run(read(args.read[0], int(args.read[1]))))
        return 0
    rounds = [round(us, 1) for us in asyncio.run(measure(args))]
    median = statistics.median(rounds)
    if args.json:
        print(json.dumps({"streams": args.streams, "tokens": args.tokens, "us": median, "of_rounds_us": rounds}))
    else:
        print(f"grpc.aio alone: {median} us of CPU a message ({' '.join(map(str, rounds))})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
