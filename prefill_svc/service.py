"""kvrelay.v1.PrefillService: a prefill worker's sessions and its list of blocks on the wire. Knows no prefilling."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc.aio

from kvrelay.rpc.block_convert import list_to_protos
from kvrelay.rpc.convert import description_to_proto, load_to_proto, report_to_protos
from kvrelay.session import Report
from kvrelay.v1 import worker_pb2, worker_pb2_grpc
from worker.block_lists import BlockLists
from worker.session_hub import SessionHub
from worker.wire import commands_of

Request = worker_pb2.PrefillServiceSessionRequest
Response = worker_pb2.PrefillServiceSessionResponse


class PrefillService(worker_pb2_grpc.PrefillServiceServicer):
    def __init__(self, hub: SessionHub, block_lists: BlockLists) -> None:
        self._hub, self._block_lists = hub, block_lists

    async def Describe(
        self, request: worker_pb2.PrefillServiceDescribeRequest, context: object
    ) -> worker_pb2.PrefillServiceDescribeResponse:
        description, load = self._hub.describe()
        return worker_pb2.PrefillServiceDescribeResponse(
            description=description_to_proto(description), load=load_to_proto(load)
        )

    async def Session(  # type: ignore[override]  # the generated base wants a generator
        self, request_iterator: AsyncIterator[Request], context: grpc.aio.ServicerContext[Request, Response]
    ) -> None:
        async def write(report: Report) -> None:
            for proto in report_to_protos(report):
                await context.write(Response(report=proto))

        await self._hub.serve(commands_of(request_iterator), write)

    async def ListBlocks(  # type: ignore[override]  # as above
        self,
        request: worker_pb2.PrefillServiceListBlocksRequest,
        context: grpc.aio.ServicerContext[
            worker_pb2.PrefillServiceListBlocksRequest, worker_pb2.PrefillServiceListBlocksResponse
        ],
    ) -> None:
        for blocks in list_to_protos(await self._block_lists.ask()):
            await context.write(worker_pb2.PrefillServiceListBlocksResponse(blocks=blocks))
