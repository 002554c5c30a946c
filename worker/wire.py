"""Sessions and links as streams of the vocabulary: the gRPC edge of both roles. Knows no hub's rules.

This and the service.py files are the only places of a worker that see protos.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio

from kvrelay.link import ToDecode, ToPrefill
from kvrelay.rpc.channel import channel_options
from kvrelay.rpc.convert import (
    CommandAssembler,
    to_decode_from_proto,
    to_decode_to_proto,
    to_prefill_from_proto,
    to_prefill_to_proto,
)
from kvrelay.rpc.fields import understood
from kvrelay.rpc.status import from_rpc_error, from_write_error
from kvrelay.session import Command
from kvrelay.v1 import link_pb2, link_pb2_grpc
from worker.link_server import LinkServer


async def commands_of(requests: AsyncIterator[Any]) -> AsyncIterator[Command]:
    """The commands in a session's requests (of either role); long ones arrive in several frames."""
    assembler = CommandAssembler()
    async for request in requests:
        command = assembler.feed(request.command)
        if command is not None:
            yield command


class LinkService(link_pb2_grpc.LinkServiceServicer):
    """kvrelay.v1.LinkService on a decode worker."""

    def __init__(self, links: LinkServer) -> None:
        self._links = links

    async def Link(  # type: ignore[override]  # the generated base mixes sync and async handlers
        self,
        request_iterator: AsyncIterator[link_pb2.LinkRequest],
        context: grpc.aio.ServicerContext[link_pb2.LinkRequest, link_pb2.LinkResponse],
    ) -> None:
        async def messages() -> AsyncIterator[ToDecode]:
            async for request in request_iterator:
                yield to_decode_from_proto(request)

        async def write(message: ToPrefill) -> None:
            await context.write(to_prefill_to_proto(message))

        await self._links.serve(messages(), write)


class _LinkCall:
    """One open call to a decode worker's LinkService."""

    def __init__(self, call: grpc.aio.StreamStreamCall[link_pb2.LinkRequest, link_pb2.LinkResponse]) -> None:
        self._call = call

    async def write(self, message: ToDecode) -> None:
        try:
            await self._call.write(to_decode_to_proto(message))
        except (grpc.RpcError, asyncio.InvalidStateError) as error:
            raise from_write_error(error) from error

    async def messages(self) -> AsyncIterator[ToPrefill]:
        try:
            async for response in self._call:
                yield to_prefill_from_proto(understood(response, "the decode worker"))
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error


@asynccontextmanager
async def dial_link(address: str) -> AsyncIterator[_LinkCall]:
    """Open a link to a decode worker. No keepalive: only the peer's kernel, or ending the process, may close it."""
    options = [(name, value) for name, value in channel_options() if "keepalive" not in name]
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        stub: link_pb2_grpc.LinkServiceAsyncStub = link_pb2_grpc.LinkServiceStub(channel)
        call = stub.Link()
        try:
            yield _LinkCall(call)
        finally:
            call.cancel()
