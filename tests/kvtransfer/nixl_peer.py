"""A decode process for the NIXL tests: a pool, a transport, and a pipe that asks it things."""

from __future__ import annotations

import hashlib
import time
from multiprocessing.connection import Connection
from typing import Any

from handoff_values import MemoryPool, ticket_of

from kvrelay.requests import Incarnation
from kvtransfer.transports.nixl import NixlTransport


def serve(pipe: Connection, incarnation: str, num_blocks: int, block_bytes: int) -> None:
    """Says hello with (metadata, pool), then answers commands until 'stop'."""
    pool = MemoryPool(num_blocks, block_bytes)
    transport = NixlTransport(Incarnation(incarnation), pool)
    transport.expect(ticket_of(epoch=1))
    pipe.send((transport.metadata(), transport.pool()))
    while True:
        command, argument = pipe.recv()
        if command == "stop":
            break
        pipe.send(_answer(command, argument, pool, transport))
    transport.close()
    pipe.send("closed")


def _answer(command: str, argument: Any, pool: MemoryPool, transport: NixlTransport) -> object:
    if command == "events":  # at least `argument` of them
        events: list[object] = []
        end = time.monotonic() + 20
        while len(events) < argument and time.monotonic() < end:
            events += transport.poll()
            time.sleep(0.001)
        return events
    if command == "hash":
        return hashlib.sha256(b"".join(pool.read(i) for i in argument)).hexdigest()
    if command == "idle":
        transport.unexpect(1)
        time.sleep(0.3)
        before = time.process_time()
        time.sleep(argument)
        return time.process_time() - before
    raise ValueError(command)
