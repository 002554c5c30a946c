"""kvrelay.v1.AdminService: who is there and how busy; sending a worker away. Knows no requests."""

from __future__ import annotations

import math

from coordinator.dispatch import Dispatcher
from coordinator.roster import Roster
from kvrelay.errors import InvalidArgument
from kvrelay.requests import WorkerId
from kvrelay.rpc.convert import description_to_proto, load_to_proto
from kvrelay.session import Drain
from kvrelay.v1 import admin_pb2, admin_pb2_grpc


class AdminService(admin_pb2_grpc.AdminServiceServicer):
    def __init__(self, roster: Roster, dispatcher: Dispatcher) -> None:
        self._roster = roster
        self._dispatcher = dispatcher

    async def GetTopology(
        self, request: admin_pb2.GetTopologyRequest, context: object
    ) -> admin_pb2.GetTopologyResponse:
        workers = [
            admin_pb2.WorkerStatus(
                description=description_to_proto(description),
                load=load_to_proto(load) if load is not None else None,
                silent_s=silent_s,
            )
            for description, load, silent_s in self._roster.listing()
        ]
        return admin_pb2.GetTopologyResponse(
            workers=workers,
            queued_requests=self._dispatcher.num_queued,
            open_requests=self._dispatcher.num_open,
            coordinator_id=self._roster.coordinator_id,
            counters=dict(self._dispatcher.counters),
        )

    async def DrainWorker(
        self, request: admin_pb2.DrainWorkerRequest, context: object
    ) -> admin_pb2.DrainWorkerResponse:
        if not math.isfinite(request.grace_s) or request.grace_s < 0:
            raise InvalidArgument(f"grace_s: must be at least 0 seconds, not {request.grace_s}", field="grace_s")
        self._roster.drain(WorkerId(request.worker_id), Drain(request.grace_s))
        return admin_pb2.DrainWorkerResponse()
