"""The configured transport, wired to the worker around it. Knows which transports exist, and nothing of tickets."""

from __future__ import annotations

import asyncio

from engine.executor import Executor
from kvrelay.link import ToDecode
from kvrelay.requests import Incarnation
from kvtransfer.transports.grpc import GrpcTransport
from kvtransfer.transports.nixl import NixlTransport
from worker.link_client import LinkClient
from worker.shell import Shell

SEND_TIMEOUT_S = 30.0
"""How long a decode worker may keep its link full before the write of a part fails."""


def make_transport(shell: Shell, executor: Executor) -> NixlTransport | GrpcTransport:
    """The transport over the executor's pool. Its events go to the engine's mailbox."""
    if shell.config.transport == "nixl":
        return NixlTransport(shell.incarnation, executor.pool, on_event=shell.on_transport_event, on_failed=shell.die)

    def send(peer: Incarnation, message: ToDecode) -> None:
        client = getattr(shell.links, "client", None)
        assert isinstance(client, LinkClient), "only prefill sends blocks"
        future = asyncio.run_coroutine_threadsafe(client.send_bulk(peer, message), shell.loop)
        future.result(SEND_TIMEOUT_S)

    return GrpcTransport(executor.pool, send, on_event=shell.on_transport_event, on_failed=shell.die)
