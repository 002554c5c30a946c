"""kvrelay.v1.DecodeService: the wire of a decode worker's sessions. Knows no decoding."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc.aio

from kvrelay.rpc.convert import description_to_proto, load_to_proto, report_to_protos
from kvrelay.session import Report
from kvrelay.v1 import worker_pb2, worker_pb2_grpc
from worker.session_hub import SessionHub
from worker.wire import commands_of

Request = worker_pb2.DecodeServiceSessionRequest
Response = worker_pb2.DecodeServiceSessionResponse


class DecodeService(worker_pb2_grpc.DecodeServiceServicer):
    def __init__(self, hub: SessionHub) -> None:
        self._hub = hub

    async def Describe(
        self, request: worker_pb2.DecodeServiceDescribeRequest, context: object
    ) -> worker_pb2.DecodeServiceDescribeResponse:
        description, load = self._hub.describe()
        return worker_pb2.DecodeServiceDescribeResponse(
            description=description_to_proto(description), load=load_to_proto(load)
        )

    async def Session(  # type: ignore[override]  # the generated base wants a generator
        self, request_iterator: AsyncIterator[Request], context: grpc.aio.ServicerContext[Request, Response]
    ) -> None:
        async def write(report: Report) -> None:
            for proto in report_to_protos(report):
                await context.write(Response(report=proto))

        await self._hub.serve(commands_of(request_iterator), write)
