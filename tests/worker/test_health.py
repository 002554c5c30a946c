"""How a worker says that it is well: while its engine comes round and something moves, or there is nothing to do."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from decode_svc.main import DecodeMain
from engine.executor import Executor
from kvrelay.config import WorkerConfig
from kvrelay.requests import Role
from kvrelay.rpc.channel import open_channel
from kvrelay.rpc.server import RpcServer
from kvtransfer.transports.grpc import GrpcTransport
from worker import health, life
from worker.patience import within
from worker.shell import Shell

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@dataclass
class Engine:
    """As the engine thread shows itself; `turns` says that it came round."""

    progress_at: float = field(default_factory=time.monotonic)
    stuck_s: float = 0.0
    told: list[bool] = field(default_factory=list)
    """What coordinators were told of it."""
    transport_hangs_s: float = 0.0

    async def keep_turning(self) -> None:
        while True:
            self.progress_at = time.monotonic()
            await asyncio.sleep(0.01)


class Asked:
    def __init__(self, stub: health_pb2_grpc.HealthStub) -> None:
        self._stub = stub

    async def until(self, status: int) -> None:
        async with asyncio.timeout(10):
            while await self.now() != status:  # noqa: ASYNC110  # only the answer says it
                await asyncio.sleep(0.01)

    async def now(self) -> int:
        return int((await self._stub.Check(health_pb2.HealthCheckRequest())).status)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "CHECK_S", 0.02)
    monkeypatch.setattr(health, "STUCK_S", 0.4)


@pytest.fixture
async def watched(quick: None) -> AsyncIterator[tuple[Engine, Asked]]:
    server, engine = RpcServer(), Engine()
    port = server.bind("127.0.0.1:0")
    await server.start()
    watching = asyncio.ensure_future(_watch(engine, server))
    async with open_channel(f"127.0.0.1:{port}") as channel:
        yield engine, Asked(health_pb2_grpc.HealthStub(channel))
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    await server.stop(0)


def _watch(engine: Engine, server: RpcServer) -> Coroutine[None, None, None]:
    return health.watch(engine, server, changed=engine.told.append, transport_hangs_s=lambda: engine.transport_hangs_s)


async def test_a_transport_that_does_not_come_round_makes_unwell_though_the_engine_does(
    watched: tuple[Engine, Asked],
) -> None:
    """No hand-off would land in such a decode worker, or be seen to: they would fail one after the other, for ever."""
    engine, asked = watched
    turning = asyncio.ensure_future(engine.keep_turning())
    engine.transport_hangs_s = 60.0
    await asked.until(NOT_SERVING)
    engine.transport_hangs_s = 0.0
    await asked.until(SERVING)
    assert engine.told == [False, True]
    turning.cancel()


async def test_a_whole_worker_looks_at_its_transport_too(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(life, "settle", lambda: None)  # this process goes on after it
    monkeypatch.setattr(health, "STUCK_S", 1.5)  # an idle engine turns twice a second
    made: list[GrpcTransport] = []

    def make(shell: Shell, executor: Executor) -> GrpcTransport:
        made.append(GrpcTransport(executor.pool, lambda _peer, _message: None))
        return made[0]

    config = WorkerConfig(Role.DECODE, executor="hash", coordinators=(), transport="grpc", num_blocks=8)
    serving: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    running = asyncio.ensure_future(life._main(config, DecodeMain(config), make, serving.set_result))
    async with asyncio.timeout(20):
        async with open_channel(await serving) as channel:
            asked = Asked(health_pb2_grpc.HealthStub(channel))
            await asked.until(SERVING)
            monkeypatch.setattr(made[0], "hangs_s", 60.0)
            await asked.until(NOT_SERVING)
        os.kill(os.getpid(), signal.SIGTERM)
        assert await running == 0


async def test_an_engine_that_does_not_come_round_is_not_well_until_it_does(watched: tuple[Engine, Asked]) -> None:
    engine, asked = watched
    await asked.until(NOT_SERVING)
    assert engine.told == [False]
    turning = asyncio.ensure_future(engine.keep_turning())
    await asked.until(SERVING)
    assert engine.told == [False, True]
    turning.cancel()


async def test_an_engine_that_comes_round_but_moves_nothing_is_not_well(watched: tuple[Engine, Asked]) -> None:
    engine, asked = watched
    turning = asyncio.ensure_future(engine.keep_turning())
    await asyncio.sleep(0.6)  # longer than what counts as stuck
    assert await asked.now() == SERVING
    engine.stuck_s = 0.5
    await asked.until(NOT_SERVING)
    engine.stuck_s = 0.0
    await asked.until(SERVING)
    turning.cancel()


async def test_our_own_pause_makes_nobody_unwell(
    watched: tuple[Engine, Asked], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, asked = watched
    turning = asyncio.ensure_future(engine.keep_turning())
    await asyncio.sleep(0.1)
    turning.cancel()
    monotonic = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + 60.0)
    await asyncio.sleep(0.1)  # some looks, with an engine that has not turned since the jump
    assert await asked.now() == SERVING
    await asked.until(NOT_SERVING)


async def test_patience_ends_after_its_limit_and_cancels_the_work() -> None:
    event = asyncio.Event()
    work = asyncio.ensure_future(event.wait())
    with pytest.raises(TimeoutError):
        await within(0.3, work)
    assert work.cancelled()
    assert await within(5.0, asyncio.sleep(0.01, "done")) == "done"


async def test_patience_begins_anew_after_our_own_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the pause it would end at 0.5 s; the pause of a minute at 0.3 s gives the work until 0.75 s at least."""
    monotonic, began = time.monotonic, time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + (60.0 if monotonic() - began > 0.3 else 0.0))
    assert await within(0.5, asyncio.sleep(0.6, "done")) == "done"
