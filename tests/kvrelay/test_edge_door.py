"""Who is kept out: by a method's door, which says why, and by the bound on a connection's open calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from kvrelay.errors import ResourceExhausted
from kvrelay.rpc import server as rpc_server
from kvrelay.rpc.channel import open_channel
from kvrelay.rpc.interceptors import GENERATE, TracingInterceptor
from kvrelay.rpc.server import RpcServer
from kvrelay.rpc.status import from_rpc_error
from kvrelay.telemetry import tracing
from kvrelay.v1 import inference_pb2, inference_pb2_grpc


class Answering(inference_pb2_grpc.InferenceServiceServicer):
    def __init__(self) -> None:
        self.asked = 0
        self.end = asyncio.Event()

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: object
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        self.asked += 1
        yield inference_pb2.GenerateResponse()
        await self.end.wait()


async def test_who_is_kept_out_hears_why_and_the_service_hears_nothing() -> None:
    server = RpcServer(interceptors=[TracingInterceptor(tracing.setup("test").provider)])
    servicer, full = Answering(), True
    servicer.end.set()
    server.add(inference_pb2_grpc.add_InferenceServiceServicer_to_server, servicer, "kvrelay.v1.InferenceService")
    server.edge.doors[GENERATE] = lambda: ResourceExhausted("no room", retry_after_s=1.5) if full else None
    port = server.bind("127.0.0.1:0")
    await server.start()
    try:
        async with open_channel(f"127.0.0.1:{port}") as channel:
            ask = channel.unary_stream(GENERATE)
            for request in (b"", b"\xff no message at all"):
                with pytest.raises(grpc.aio.AioRpcError) as info:
                    _ = [answer async for answer in ask(request)]
                error = from_rpc_error(info.value)
                assert (type(error), error.message, error.retry_after_s) == (ResourceExhausted, "no room", 1.5)
            assert servicer.asked == 0
            full = False
            assert [answer async for answer in ask(b"")] == [b""]
            full = server.edge.draining = True
            with pytest.raises(grpc.aio.AioRpcError) as info:
                _ = [answer async for answer in ask(b"")]
            assert info.value.code() is grpc.StatusCode.UNAVAILABLE
    finally:
        await server.stop(0.1)


async def test_calls_over_the_bound_of_one_connection_wait_and_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc_server, "MAX_STREAMS", 2)
    server, servicer = RpcServer(), Answering()
    server.add(inference_pb2_grpc.add_InferenceServiceServicer_to_server, servicer, "kvrelay.v1.InferenceService")
    address = f"127.0.0.1:{server.bind('127.0.0.1:0')}"
    await server.start()
    try:
        async with open_channel(address) as channel, open_channel(address) as other:
            calls = [channel.unary_stream(GENERATE)(b"") for _ in range(2)]
            assert await asyncio.gather(calls[0].read(), calls[1].read()) == [b"", b""]
            calls.append(channel.unary_stream(GENERATE)(b""))
            assert await other.unary_stream(GENERATE)(b"").read() == b""
            assert servicer.asked == 3
            third = asyncio.ensure_future(calls[2].read())
            calls[0].cancel()
            assert await third == b""
            servicer.end.set()
    finally:
        await server.stop(0.1)
