"""One announcement of a worker to a coordinator, in the words of the vocabulary."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import grpc
import grpc.aio

from kvrelay.rpc.channel import open_channel
from kvrelay.rpc.convert import description_to_proto
from kvrelay.rpc.fields import understood
from kvrelay.rpc.status import from_rpc_error
from kvrelay.session import WorkerDescription
from kvrelay.v1 import registry_pb2, registry_pb2_grpc

ANNOUNCE_TIMEOUT_S = 2.0

Announcer = Callable[[WorkerDescription, bool], Awaitable[str]]
"""Tells one coordinator that the worker is there, or (True) leaving; returns the coordinator's id."""


async def announce(channel: grpc.aio.Channel, description: WorkerDescription, *, leaving: bool = False) -> str:
    """Tell a coordinator that the worker is there, or leaving; returns the coordinator's id. Raises KVRelayError."""
    stub = registry_pb2_grpc.RegistryServiceStub(channel)
    request = registry_pb2.AnnounceRequest(description=description_to_proto(description), leaving=leaving)
    try:
        response = await stub.Announce(request, timeout=ANNOUNCE_TIMEOUT_S)
    except grpc.RpcError as error:
        raise from_rpc_error(error) from error
    return str(understood(response, "the coordinator").coordinator_id)


@asynccontextmanager
async def open_announcer(address: str) -> AsyncIterator[Announcer]:
    """A way to announce to the coordinator at `address`, over one channel."""
    async with open_channel(address) as channel:

        async def tell(description: WorkerDescription, leaving: bool) -> str:
            return await announce(channel, description, leaving=leaving)

        yield tell
