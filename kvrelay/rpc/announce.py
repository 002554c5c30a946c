"""One announcement of a worker to a coordinator, in the words of the vocabulary."""

from __future__ import annotations

import grpc
import grpc.aio

from kvrelay.rpc.convert import description_to_proto
from kvrelay.rpc.status import from_rpc_error
from kvrelay.session import WorkerDescription
from kvrelay.v1 import registry_pb2, registry_pb2_grpc

ANNOUNCE_TIMEOUT_S = 2.0


async def announce(channel: grpc.aio.Channel, description: WorkerDescription, *, leaving: bool = False) -> str:
    """Tell a coordinator that the worker is there, or leaving; returns the coordinator's id. Raises KVRelayError."""
    stub = registry_pb2_grpc.RegistryServiceStub(channel)
    request = registry_pb2.AnnounceRequest(description=description_to_proto(description), leaving=leaving)
    try:
        response = await stub.Announce(request, timeout=ANNOUNCE_TIMEOUT_S)
    except grpc.RpcError as error:
        raise from_rpc_error(error) from error
    return str(response.coordinator_id)
