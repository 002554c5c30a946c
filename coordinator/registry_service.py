"""kvrelay.v1.RegistryService: workers say where they are. Discovery only; who is alive their sessions say."""

from __future__ import annotations

from coordinator.roster import Roster
from kvrelay.rpc.convert import description_from_proto
from kvrelay.v1 import registry_pb2, registry_pb2_grpc


class RegistryService(registry_pb2_grpc.RegistryServiceServicer):
    def __init__(self, roster: Roster) -> None:
        self._roster = roster

    async def Announce(self, request: registry_pb2.AnnounceRequest, context: object) -> registry_pb2.AnnounceResponse:
        description = description_from_proto(request.description)
        if request.leaving:
            self._roster.leaving(description.worker_id, description.incarnation)
        else:
            self._roster.announced(description)
        return registry_pb2.AnnounceResponse(coordinator_id=self._roster.coordinator_id)
