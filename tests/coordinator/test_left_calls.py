"""Calls that a coordinator makes of its workers are over at the worker however they are left. gRPC would keep them."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest
from support.door import until
from support.fake_workers import FakeWorker

from coordinator.session_wire import SessionCall, dial_worker, list_blocks
from kvrelay.errors import Unavailable
from kvrelay.requests import Role, SessionId
from kvrelay.rpc.server import RpcServer
from kvrelay.session import Heartbeat, Hello, WorkerDescription
from kvrelay.v1 import worker_pb2, worker_pb2_grpc


@pytest.fixture(autouse=True)
def nothing_is_collected() -> Iterator[None]:
    """What ends only with the garbage collector does not end."""
    gc.disable()
    yield
    gc.enable()


async def returns(call: SessionCall) -> None:
    pass


async def raises(call: SessionCall) -> None:
    raise Unavailable("ordered by a test")


async def waits(call: SessionCall) -> None:
    while await call.read() is not None:
        pass


async def is_cancelled(call: SessionCall) -> None:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().call_later(0.05, task.cancel)
    await waits(call)


async def takes_too_long(call: SessionCall) -> None:
    async with asyncio.timeout(0.05):
        await waits(call)


@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize(
    ("leave", "error"),
    [
        (returns, None),
        (raises, Unavailable),
        (is_cancelled, asyncio.CancelledError),
        (takes_too_long, TimeoutError),
    ],
)
async def test_a_session_is_over_at_the_worker_however_it_is_left(
    role: Role, leave: Callable[[SessionCall], Awaitable[None]], error: type[BaseException] | None
) -> None:
    async def talk(description: WorkerDescription) -> None:
        async with dial_worker(description) as call:
            await call.write(Hello("c", SessionId("s")))
            assert (await call.read()) is not None
            assert worker.server.edge.running == 1
            await leave(call)

    async with FakeWorker(role, "w") as worker:
        (result,) = await asyncio.gather(asyncio.create_task(talk(worker.describe())), return_exceptions=True)
        assert type(result) is (type(None) if error is None else error)
        await until(lambda: worker.server.edge.running == 0, 1.0)


@pytest.mark.parametrize("last", [RuntimeError("ordered by a test"), None])
async def test_a_write_to_a_session_that_is_over_fails_as_one_that_breaks_does(last: Exception | None) -> None:
    """And not as a bug of ours, which is logged with its traceback."""
    async with FakeWorker(Role.DECODE, "w") as worker, dial_worker(worker.describe()) as call:
        await call.write(Hello("c", SessionId("s")))
        assert (await call.read()) is not None
        worker.sessions[0].put_nowait(last)
        await until(call._call.done)  # type: ignore[attr-defined]  # gRPC's own
        with pytest.raises(Unavailable, match="the call is over"):
            await call.write(Heartbeat(1, 1.0))


class Lists(worker_pb2_grpc.DecodeServiceServicer):
    """Says one piece of a list that has no end."""

    async def Session(self, request_iterator: Any, context: Any) -> None: ...

    async def Describe(self, request: Any, context: Any) -> Any: ...

    async def ListBlocks(self, request: Any, context: Any) -> AsyncIterator[Any]:
        yield worker_pb2.DecodeServiceListBlocksResponse()
        await asyncio.Event().wait()


async def test_a_list_of_blocks_that_nobody_waits_for_any_more_is_over_at_the_worker() -> None:
    server = RpcServer()
    server.add(worker_pb2_grpc.add_DecodeServiceServicer_to_server, Lists(), "kvrelay.v1.DecodeService")
    address = f"127.0.0.1:{server.bind('127.0.0.1:0')}"
    await server.start()
    try:
        about = FakeWorker(Role.DECODE, "w").describe(address=address)
        asking = asyncio.create_task(list_blocks(about))
        await until(lambda: server.edge.running == 1)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        assert asking.cancelled()
        await until(lambda: server.edge.running == 0, 1.0)
    finally:
        await server.stop(0)
