"""kvrelay.v1.AdminService: who is there and how busy; sending a worker away. Knows no requests."""

from __future__ import annotations

import math

from coordinator.dispatch import Dispatcher
from coordinator.roster import Roster
from kvrelay.errors import InvalidArgument
from kvrelay.requests import WorkerId
from kvrelay.rpc.convert import description_to_proto, load_to_proto
from kvrelay.session import Drain, Load, WorkerDescription
from kvrelay.v1 import admin_pb2, admin_pb2_grpc


class AdminService(admin_pb2_grpc.AdminServiceServicer):
    def __init__(self, roster: Roster, dispatcher: Dispatcher) -> None:
        self._roster = roster
        self._dispatcher = dispatcher

    async def GetTopology(
        self, request: admin_pb2.GetTopologyRequest, context: object
    ) -> admin_pb2.GetTopologyResponse:
        return admin_pb2.GetTopologyResponse(
            workers=[self._status(*worker) for worker in self._roster.listing()],
            queued_requests=self._dispatcher.num_queued,
            open_requests=self._dispatcher.num_open,
            coordinator_id=self._roster.coordinator_id,
            counters=dict(self._dispatcher.counters),
        )

    def _status(self, about: WorkerDescription, load: Load | None, silent_s: float) -> admin_pb2.WorkerStatus:
        clock = self._roster.clock_of(about.worker_id)
        return admin_pb2.WorkerStatus(
            description=description_to_proto(about),
            load=None if load is None else load_to_proto(load),
            silent_s=silent_s,
            clock=None if clock is None else admin_pb2.Clock(offset_s=clock.offset_s, error_s=clock.error_s),
        )

    async def DrainWorker(
        self, request: admin_pb2.DrainWorkerRequest, context: object
    ) -> admin_pb2.DrainWorkerResponse:
        if not math.isfinite(request.grace_s) or request.grace_s < 0:
            raise InvalidArgument(f"grace_s: must be at least 0 seconds, not {request.grace_s}", field="grace_s")
        self._roster.drain(WorkerId(request.worker_id), Drain(request.grace_s))
        return admin_pb2.DrainWorkerResponse()
