"""A grpc.aio server's life: options, services, health, reflection, bind, bounded stop. Knows no service's meaning.

1. `RpcServer(...)` inside the event loop that will serve; one loop a process.
2. `add` each service; `bind` gives the real port, or an error that names the address.
3. `start`: liveness ("") says SERVING, each service NOT_SERVING until `set_ready`.
4. `stop(grace_s)`: not ready, new calls refused, running calls given their time, then cancelled.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection

from kvrelay.errors import FailedPrecondition
from kvrelay.rpc.channel import DEFAULT_MESSAGE_BYTES, KEEPALIVE_S, KEEPALIVE_TIMEOUT_S, Option
from kvrelay.rpc.edge import EdgeInterceptor

LAST_WORD_S = 0.25
"""After the grace: how long a status already written may take to leave."""
MAX_STREAMS = 4096
"""Calls that one connection may have open; its client's library lets further ones wait. More than any limit of ours."""
HEALTH_SERVICE = "grpc.health.v1.Health"


def server_options(max_receive_bytes: int = DEFAULT_MESSAGE_BYTES, *, keepalive: bool = True) -> list[Option]:
    """Clients may ping while idle; a port in use fails to bind instead of being shared.

    keepalive: ping clients, and close the connection of one that does not answer.
    """
    pings: list[Option] = [
        ("grpc.keepalive_time_ms", round(KEEPALIVE_S * 1000)),
        ("grpc.keepalive_timeout_ms", round(KEEPALIVE_TIMEOUT_S * 1000)),
    ]
    return [
        *(pings if keepalive else []),
        ("grpc.max_receive_message_length", max_receive_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.so_reuseport", 0),
    ]


class RpcServer:
    """One server of one process. Errors of handlers become rich statuses (see edge)."""

    def __init__(
        self,
        *,
        max_receive_bytes: int = DEFAULT_MESSAGE_BYTES,
        keepalive: bool = True,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    ) -> None:
        self.edge = EdgeInterceptor()
        self.health = health_aio.HealthServicer()
        self.services: list[str] = []
        self.grpc = grpc.aio.server(
            interceptors=[self.edge, *interceptors], options=server_options(max_receive_bytes, keepalive=keepalive)
        )
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.grpc)

    def add(self, register: Callable[[Any, grpc.aio.Server], None], servicer: object, name: str) -> None:
        """Registers a service. register: the generated add_NAMEServicer_to_server; name: its full name."""
        register(servicer, self.grpc)
        self.services.append(name)

    def bind(self, address: str) -> int:
        """Listens on HOST:PORT (0: any free port) and returns the real port. FailedPrecondition names the address."""
        try:
            return self.grpc.add_insecure_port(address)
        except RuntimeError as error:
            message = f"cannot listen on {address}: {_reason(address)}"
            raise FailedPrecondition(message, field="listen") from error

    async def start(self) -> None:
        """Serves what was added. Each service is NOT_SERVING until `set_ready`."""
        names = [*self.services, HEALTH_SERVICE, reflection.SERVICE_NAME]
        reflection.enable_server_reflection(names, self.grpc)
        await self.set_ready(False)
        await self.grpc.start()

    async def set_ready(self, ready: bool, name: str | None = None) -> None:
        """Readiness of one service, or of all."""
        word = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in self.services if name is None else [name]:
            await self.health.set(service, word)

    async def stop(self, grace_s: float) -> None:
        """Ends within grace_s + LAST_WORD_S. Calls still running after grace_s are cancelled.

        Ours to wait, not the library's: its own grace cuts running calls short when another one ends by abort.
        """
        await self.health.enter_graceful_shutdown()
        self.edge.draining = True
        try:
            async with asyncio.timeout(grace_s):
                await self.edge.wait_idle()
        except TimeoutError:
            pass
        finally:
            await self.grpc.stop(LAST_WORD_S if not self.edge.running else None)


def _reason(address: str) -> str:
    """Why nothing can listen there: the library does not say, so a plain socket is asked."""
    host, _, port = address.rpartition(":")
    try:
        for family, *_, where in socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM):
            socket.create_server(where[:2], family=family).close()
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error)
    return "the library refused the address"
