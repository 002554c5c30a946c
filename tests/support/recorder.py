"""Asks a coordinator and keeps every message as it came. Takes raw messages: the client library would check them first.

`load` keeps a number of streams going beside a test's body; all that was seen ends in one `History`.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
from support.golden import Case
from support.history import AcceptedSeen, Fault, FinishSeen, Seen, StatusSeen, Stream, Tally, TokenSeen
from support.streams import answer_of

from kvrelay.client.request import GENERATE, generate_request
from kvrelay.rpc.channel import open_channel
from kvrelay.v1 import common_pb2, inference_pb2

DEADLINE_S = 60.0
Judge = Callable[..., Tally]
"""The fixture `verdict` of tests/faults: (history, rules, counts) -> Tally; fails on any violation."""
AFTER_ERROR_S = 0.1
"""A client whose stream failed asks again after so long."""


class HashReference:
    """One process with the hash model; tokens are bytes."""

    def tokens(self, case: Case) -> tuple[int, ...]:
        return answer_of(case)

    def text(self, token_ids: Sequence[int]) -> str:
        return bytes(i for i in token_ids if i < 256).decode("utf-8", "replace")


class Asked:
    """A stream while it runs: `seen` grows."""

    def __init__(self, name: str, case: Case) -> None:
        self.name, self.case = name, case
        self.sent_at = time.monotonic()
        self.seen: list[Seen] = []
        self.left_at: float | None = None

    @property
    def num_tokens(self) -> int:
        return sum(isinstance(s, TokenSeen) for s in self.seen)

    @property
    def has_ended(self) -> bool:
        return self.left_at is not None or (bool(self.seen) and isinstance(self.seen[-1], StatusSeen))

    def stream(self) -> Stream:
        return Stream(self.name, self.case, self.sent_at, tuple(self.seen), self.left_at)


@dataclass
class History:
    """All streams asked so far, the running ones among them, and the faults that a test recorded."""

    asked: list[Asked] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)

    @property
    def streams(self) -> list[Stream]:
        return [asked.stream() for asked in self.asked]


class Recorder:
    """Streams to one coordinator, in the running event loop. `async with` closes the channel."""

    def __init__(self, target: str, history: History, name: str = "") -> None:
        self._history, self._name = history, name or target
        self._channel = open_channel(target)
        self._method = self._channel.unary_stream(
            GENERATE,
            request_serializer=inference_pb2.GenerateRequest.SerializeToString,
            response_deserializer=inference_pb2.GenerateResponse.FromString,
        )
        self._serial = itertools.count()

    async def ask(self, case: Case, deadline_s: float = DEADLINE_S) -> Asked:
        """Read one stream to its end, whatever that is. Cancelling the task is a client that leaves."""
        asked = Asked(f"{self._name} {next(self._serial)}", case)
        self._history.asked.append(asked)
        call = self._method(request_of(case), timeout=deadline_s)
        try:
            async for message in call:
                seen = _seen(message, time.monotonic())
                if seen is not None:
                    asked.seen.append(seen)
            asked.seen.append(StatusSeen("OK", "", time.monotonic()))
        except grpc.RpcError as error:
            asked.seen.append(StatusSeen(error.code().name, error.details() or "", time.monotonic()))
        except asyncio.CancelledError:
            asked.left_at = time.monotonic()
            raise
        finally:
            call.cancel()
        return asked

    async def close(self) -> None:
        await self._channel.close()

    async def __aenter__(self) -> Recorder:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def request_of(case: Case) -> inference_pb2.GenerateRequest:
    sampling = case.sampling
    return generate_request(
        list(case.prompt),
        {
            "max_tokens": case.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "seed": sampling.seed,
            "ignore_eos": True,
        },
    )


def _seen(message: inference_pb2.GenerateResponse, at: float) -> Seen | None:
    match message.WhichOneof("event"):
        case "accepted":
            return AcceptedSeen(message.accepted.request_id, message.accepted.prompt_tokens, at)
        case "token":
            token = message.token
            return TokenSeen(token.index, token.token_id, token.text, at)
        case "finished":
            end = message.finished
            reason = common_pb2.FinishReason.Name(end.reason).removeprefix("FINISH_REASON_").lower()
            tokens = (end.usage.prompt_tokens, end.usage.completion_tokens)
            return FinishSeen(reason, end.text, *tokens, end.prefill_worker, end.decode_worker, at, end.migrations)
    return None


@asynccontextmanager
async def load(
    target: str, cases: Iterable[Case], concurrency: int, history: History, name: str = ""
) -> AsyncIterator[Recorder]:
    """So many streams at any time, over the cases in turn, until the body ends; the last ones are read to their end.

    A list begins anew behind its last case, so that a cache knows most of it soon; an iterator has no end.
    """
    turn, stop = itertools.cycle(cases), asyncio.Event()
    async with Recorder(target, history, name) as recorder:

        async def keep_asking() -> None:
            while not stop.is_set():
                asked = await recorder.ask(next(turn))
                if not isinstance(asked.seen[-1], StatusSeen) or asked.seen[-1].code != "OK":
                    await asyncio.sleep(AFTER_ERROR_S)

        tasks = [asyncio.create_task(keep_asking()) for _ in range(concurrency)]
        try:
            yield recorder
            stop.set()
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def until(condition: Callable[[], bool], what: str, within_s: float = 20.0) -> None:
    ends_at = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < ends_at, f"not within {within_s} s: {what}"
        await asyncio.sleep(0.01)  # a poll, bounded above


async def under_way(history: History, num_tokens: int = 200) -> None:
    """Until so many tokens have come, so that a fault meets streams in every phase."""
    await until(lambda: sum(a.num_tokens for a in history.asked) >= num_tokens, f"{num_tokens} tokens")


async def goes_on(history: History, num_streams: int = 8) -> None:
    """Until so many streams that begin from now on have ended well."""
    first = len(history.asked)

    def have() -> bool:
        ended = (a.seen[-1] for a in history.asked[first:] if a.seen)
        return sum(isinstance(last, StatusSeen) and last.code == "OK" for last in ended) >= num_streams

    await until(have, f"{num_streams} new streams end well")
