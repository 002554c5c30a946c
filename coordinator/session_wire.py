"""A session's stream to one worker over gRPC, and the list of what it caches. Knows frames, not what they mean."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol

import grpc

from kvrelay.blocks import BlockList
from kvrelay.requests import Role
from kvrelay.rpc.block_convert import list_from_protos
from kvrelay.rpc.channel import open_channel
from kvrelay.rpc.convert import command_to_protos, report_from_proto
from kvrelay.rpc.fields import understood
from kvrelay.rpc.status import from_rpc_error, from_write_error
from kvrelay.session import Command, Report, WorkerDescription
from kvrelay.v1 import worker_pb2, worker_pb2_grpc


class SessionCall(Protocol):
    """An open session. Both raise a KVRelayError when it is broken; `read` returns None when the worker ended it."""

    async def write(self, command: Command) -> None: ...

    async def read(self) -> Report | None: ...


Dial = Callable[[WorkerDescription], AbstractAsyncContextManager[SessionCall]]
"""Leaving the context ends the call, whatever its state."""
ListBlocks = Callable[[WorkerDescription], Awaitable[BlockList]]
"""Everything this worker caches now. Raises a KVRelayError when it does not say."""
LIST_DEADLINE_S = 5.0


class _GrpcCall:
    def __init__(self, call: Any, wrap: Callable[[worker_pb2.Command], Any]) -> None:
        self._call, self._wrap = call, wrap

    async def write(self, command: Command) -> None:
        try:
            for frame in command_to_protos(command):
                await self._call.write(self._wrap(frame))
        except (grpc.RpcError, asyncio.InvalidStateError) as error:
            raise from_write_error(error) from error

    async def read(self) -> Report | None:
        try:
            response = await self._call.read()
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        return None if response is grpc.aio.EOF else report_from_proto(understood(response, "the worker").report)


@asynccontextmanager
async def dial_worker(description: WorkerDescription) -> AsyncIterator[SessionCall]:
    """Opens a session with the worker at this address."""
    async with open_channel(description.address) as channel:
        call, wrap = _open(channel, description.role)
        try:
            yield _GrpcCall(call, wrap)
        finally:
            call.cancel()


async def list_blocks(description: WorkerDescription) -> BlockList:
    """Asks the worker at this address. DeadlineExceeded after LIST_DEADLINE_S."""
    async with open_channel(description.address) as channel:
        try:
            pages = _pages(channel, description.role)
            return list_from_protos([understood(response, "the worker").blocks async for response in pages])
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error


def _pages(channel: grpc.aio.Channel, role: Role) -> AsyncIterator[Any]:
    """The role's answers, each with a piece of the list."""
    if role is Role.PREFILL:
        prefill = worker_pb2.PrefillServiceListBlocksRequest()
        return aiter(worker_pb2_grpc.PrefillServiceStub(channel).ListBlocks(prefill, timeout=LIST_DEADLINE_S))
    decode = worker_pb2.DecodeServiceListBlocksRequest()
    return aiter(worker_pb2_grpc.DecodeServiceStub(channel).ListBlocks(decode, timeout=LIST_DEADLINE_S))


def _open(channel: grpc.aio.Channel, role: Role) -> tuple[Any, Callable[[worker_pb2.Command], Any]]:
    """The call of the role's service, and how its requests hold a command."""
    if role is Role.PREFILL:
        prefill = worker_pb2_grpc.PrefillServiceStub(channel).Session()
        return prefill, lambda command: worker_pb2.PrefillServiceSessionRequest(command=command)
    decode = worker_pb2_grpc.DecodeServiceStub(channel).Session()
    return decode, lambda command: worker_pb2.DecodeServiceSessionRequest(command=command)
