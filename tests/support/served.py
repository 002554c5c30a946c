"""Servicers on a server with a loop and a thread of its own, so that a test may block while it asks them."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from kvrelay.rpc.server import RpcServer
from kvrelay.v1 import admin_pb2_grpc, inference_pb2_grpc, model_pb2_grpc


class Served:
    """The public services, those of them that are given."""

    def __init__(self, inference: Any = None, models: Any = None, admin: Any = None) -> None:
        self.inference = inference
        services = (
            (inference_pb2_grpc.add_InferenceServiceServicer_to_server, inference, "kvrelay.v1.InferenceService"),
            (model_pb2_grpc.add_ModelServiceServicer_to_server, models, "kvrelay.v1.ModelService"),
            (admin_pb2_grpc.add_AdminServiceServicer_to_server, admin, "kvrelay.v1.AdminService"),
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.target = self._run(self._start([service for service in services if service[1] is not None]))

    async def _start(self, services: list[tuple[Any, Any, str]]) -> str:
        self._server = RpcServer()
        for add, servicer, name in services:
            self._server.add(add, servicer, name)
        port = self._server.bind("127.0.0.1:0")
        await self._server.start()
        return f"127.0.0.1:{port}"

    def close(self) -> None:
        self._run(self._server.stop(0.1))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def _run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10)
