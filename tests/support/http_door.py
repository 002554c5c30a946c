"""Both doors of a coordinator in this process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from support.door import Door
from support.http_client import Answer, asked

from coordinator.http.server import HttpServer


@dataclass
class HttpDoor:
    grpc: Door

    @property
    def server(self) -> HttpServer:
        assert self.grpc.coordinator.http is not None
        return self.grpc.coordinator.http

    @property
    def address(self) -> str:
        """HOST:PORT of the OpenAI door."""
        return self.server.address

    async def post(self, path: str, body: Any, **headers: str) -> Answer:
        return await asked(self.address, path, body, **headers)

    async def get(self, path: str) -> Answer:
        return await asked(self.address, path, method="GET")
