"""A coordinator in this process with a client's channel to it, and what the client saw of each call."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from support.fake_workers import FakeWorker

from coordinator.main import Coordinator
from coordinator.model_facts import load_model
from kvrelay.config import CoordinatorConfig
from kvrelay.errors import KVRelayError
from kvrelay.rpc.channel import open_channel
from kvrelay.rpc.status import from_rpc_error
from kvrelay.v1 import inference_pb2, inference_pb2_grpc

MODEL = load_model(CoordinatorConfig(executor="hash"))
Pairs = tuple[FakeWorker, FakeWorker, FakeWorker, FakeWorker]
"""p0, p1, d0, d1."""


async def until(condition: Callable[[], Any], seconds: float = 5.0) -> None:
    """Waits for a condition with a bound."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        await asyncio.sleep(0.005)


@dataclass
class Answer:
    """What a client saw of one call."""

    accepted: inference_pb2.Accepted | None = None
    tokens: list[inference_pb2.Token] = field(default_factory=list)
    finished: inference_pb2.Finished | None = None
    error: KVRelayError | None = None

    @property
    def ids(self) -> list[int]:
        return [t.token_id for t in self.tokens]

    @property
    def text(self) -> str:
        return "".join(t.text for t in self.tokens) + (self.finished.text if self.finished else "")

    def take(self, message: inference_pb2.GenerateResponse) -> None:
        match message.WhichOneof("event"):
            case "accepted":
                assert self.accepted is None
                self.accepted = message.accepted
            case "token":
                assert message.token.index == len(self.tokens), "each index once and in order"
                self.tokens.append(message.token)
            case _:
                assert self.finished is None
                self.finished = message.finished


class Door:
    """A coordinator with a client's channel to it."""

    def __init__(self, coordinator: Coordinator, address: str, channel: grpc.aio.Channel) -> None:
        self.coordinator, self.address, self.channel = coordinator, address, channel
        self.stub = inference_pb2_grpc.InferenceServiceStub(channel)

    def call(self, timeout: float | None = None, **fields: Any) -> Any:
        request = inference_pb2.GenerateRequest(**fields)
        return self.stub.Generate(request, timeout=timeout)

    async def ask(self, timeout: float | None = None, **fields: Any) -> Answer:
        return await read_all(self.call(timeout, **fields))

    def begin(self, **fields: Any) -> tuple[Answer, asyncio.Task[Answer]]:
        """A call that is being read: the answer grows until the task is done."""
        answer = Answer()
        return answer, asyncio.ensure_future(read_all(self.call(**fields), answer))

    @property
    def counters(self) -> Any:
        return self.coordinator.dispatcher.counters

    async def idle(self) -> None:
        dispatcher = self.coordinator.dispatcher
        await until(lambda: dispatcher.num_open == 0 and not dispatcher._live)


async def read_all(call: Any, answer: Answer | None = None) -> Answer:
    answer = Answer() if answer is None else answer
    try:
        async for message in call:
            answer.take(message)
    except grpc.RpcError as error:
        answer.error = from_rpc_error(error)
    return answer


async def join(door: Door, *workers: FakeWorker) -> None:
    for worker in workers:
        await worker.announce_to(door.address)
    await until(lambda: len(door.coordinator.roster.listing()) == len(workers))


def held(worker: FakeWorker, step: str) -> None:
    worker.hold[step] = asyncio.Event()


@contextmanager
def slow_tokenizer(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A text takes until the end of the block; the event is set once one is being tokenized."""
    begun, go_on, encode = threading.Event(), threading.Event(), MODEL.codec.encode

    def waiting(text: str, add_special_tokens: bool) -> list[int]:
        begun.set()
        assert go_on.wait(10)
        return encode(text, add_special_tokens)

    monkeypatch.setattr(MODEL.codec, "encode", waiting)
    try:
        yield begun
    finally:
        go_on.set()


@asynccontextmanager
async def opened(**changes: Any) -> AsyncIterator[Door]:
    """A coordinator of the hash model with these settings, and a channel to it; it is stopped at the end."""
    coordinator = Coordinator(CoordinatorConfig(**{"listen": "127.0.0.1:0", "executor": "hash", **changes}), MODEL)
    address = await coordinator.start()
    async with open_channel(address) as channel:
        yield Door(coordinator, address, channel)
    await coordinator.stop(0)
