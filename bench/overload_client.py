"""One client process of bench/overload.py: asks as it is told on stdin, one JSON order a line, and reports on stdout.

The first line is the set-up: target, and the cases as (prompt, expected tokens); once connected it answers `ready`.
Order: {"mode": "closed", "concurrency": N, "until": T} or {"mode": "open", "rate": R, "begin": T, "until": T}; times on
the monotonic clock. Answer: one line, a list of outcomes (see Outcome). Cost per call is what counts here: requests are
serialized once.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from dataclasses import astuple, dataclass
from typing import Any

import grpc

from kvrelay.client.request import GENERATE, generate_request
from kvrelay.rpc.channel import open_channel
from kvrelay.rpc.process import settle
from kvrelay.rpc.status import from_rpc_error
from kvrelay.v1 import inference_pb2

TIMEOUT_S = 60.0
MAX_OPEN = 4000
"""Calls of one process under way at once; beyond it the generator waits, and what waits is counted as late."""


@dataclass(slots=True)
class Outcome:
    """Times on the monotonic clock. due: when an open loop wanted to send; first: the first token, None without one.

    status: OK, or the name of the error's code. exact: an OK answer was, token for token, what was expected, in order.
    hint: the error said when to try again. late: s that the generator itself lost before it sent.
    """

    due: float
    sent: float
    ended: float = 0.0
    first: float | None = None
    status: str = "OK"
    exact: bool = False
    hint: bool = False


class Asker:
    def __init__(self, channel: grpc.aio.Channel, cases: list[tuple[list[int], list[int]]]) -> None:
        self._method = channel.unary_stream(GENERATE)
        self._cases = [
            (
                generate_request(
                    prompt, {"max_tokens": len(expected), "temperature": 0.0, "ignore_eos": True}
                ).SerializeToString(),
                expected,
            )
            for prompt, expected in cases
        ]

    async def ask(self, number: int, due: float, outcomes: list[Outcome]) -> None:
        raw, expected = self._cases[number % len(self._cases)]
        outcome = Outcome(due, time.monotonic())
        try:
            await self._read(raw, expected, outcome)
        except grpc.aio.AioRpcError as error:
            outcome.ended = time.monotonic()
            outcome.status = error.code().name
            outcome.hint = from_rpc_error(error).retry_after_s is not None
        outcomes.append(outcome)

    async def _read(self, raw: bytes, expected: list[int], outcome: Outcome) -> None:
        token_ids: list[int] = []
        finished = in_order = True
        async for answer in self._method(raw, timeout=TIMEOUT_S):
            message = inference_pb2.GenerateResponse.FromString(answer)
            kind = message.WhichOneof("event")
            if kind == "token":
                if not token_ids:
                    outcome.first = time.monotonic()
                in_order = in_order and message.token.index == len(token_ids)
                token_ids.append(message.token.token_id)
            finished = kind == "finished"
        outcome.ended = time.monotonic()
        outcome.exact = finished and in_order and token_ids == expected


async def closed(asker: Asker, order: dict[str, Any], outcomes: list[Outcome]) -> None:
    """So many at once, each sends its next as soon as it has its answer, after a moment if it was refused."""

    async def keep_asking(number: int) -> None:
        while (now := time.monotonic()) < order["until"]:
            await asker.ask(number, now, outcomes)
            number += order["concurrency"]
            if outcomes[-1].status != "OK":
                await asyncio.sleep(0.05)

    await asyncio.gather(*(keep_asking(n) for n in range(order["concurrency"])))


async def opened(asker: Asker, order: dict[str, Any], outcomes: list[Outcome]) -> None:
    """Sends at random times of the given rate, whatever becomes of what was sent before."""
    rng, due, number = random.Random(order.get("seed", 0)), order["begin"], 0
    tasks: set[asyncio.Task[None]] = set()
    while (due := due + rng.expovariate(order["rate"])) < order["until"]:
        if (wait := due - time.monotonic()) > 0:
            await asyncio.sleep(wait)
        while len(tasks) >= MAX_OPEN:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        task = asyncio.create_task(asker.ask(number, due, outcomes))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        number += 1
    await asyncio.gather(*tasks)


async def main() -> None:
    setup = json.loads(sys.stdin.readline())
    loop = asyncio.get_running_loop()
    async with open_channel(setup["target"]) as channel:
        asker = Asker(channel, setup["cases"])
        await asker.ask(0, time.monotonic(), [])
        settle()
        print("ready", flush=True)
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            order, outcomes = json.loads(line), []
            await {"closed": closed, "open": opened}[order["mode"]](asker, order, outcomes)
            print(json.dumps([astuple(outcome) for outcome in outcomes]), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
