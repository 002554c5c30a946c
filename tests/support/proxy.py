"""A small TCP proxy between two processes under test: forwards, counts, slows, resets. Knows no gRPC.

It stands at an address that a worker advertises, so several processes come through it; `cut` can be told whose
connections it means, by process id.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import threading
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

CHUNK = 65536
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER on, 0 s: close sends a reset."""


@dataclass(frozen=True, slots=True)
class Reset:
    """connections: how many were reset; forwarded: bytes that had gone through them before, both ways."""

    connections: int
    forwarded: int


@dataclass(slots=True, eq=False)
class _Connection:
    client: socket.socket
    server: socket.socket
    writers: tuple[asyncio.StreamWriter, asyncio.StreamWriter]
    client_port: int
    forwarded: int = 0


class Proxy:
    """Listens at `address` from the start; forwards once `aim` has said where to. Runs in a thread until `stop`."""

    def __init__(self) -> None:
        self.bytes_forwarded = 0
        self.bytes_delayed = 0
        self._target: tuple[str, int] | None = None
        self._delay_s, self._bytes_per_s = 0.0, 0.0
        self._connections: set[_Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        self._server = self._run(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port: int = self._server.sockets[0].getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"

    def aim(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))

    def cut(self, client_pid: int | None = None) -> Reset:
        """Reset all connections now, or those that this process made."""
        return self._run(self._cut(client_pid))

    def slow(self, delay_s: float = 0.0, bytes_per_s: float = 0.0) -> None:
        """From now on each chunk waits delay_s, and no direction carries more than bytes_per_s; 0 and 0: at once."""
        self._delay_s, self._bytes_per_s = delay_s, bytes_per_s

    def num_connections(self, client_pid: int | None = None) -> int:
        return len(self._of(client_pid))

    def stop(self) -> None:
        self._run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()

    # below: on the loop's thread

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        with contextlib.suppress(OSError):
            if self._target is not None:
                await self._forward(reader, writer, *await asyncio.open_connection(*self._target))
        writer.close()

    async def _forward(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        far_reader: asyncio.StreamReader,
        far_writer: asyncio.StreamWriter,
    ) -> None:
        client, server = writer.get_extra_info("socket"), far_writer.get_extra_info("socket")
        port = writer.get_extra_info("peername")[1]
        connection = _Connection(client, server, (writer, far_writer), port)
        self._connections.add(connection)
        pumps = [
            asyncio.ensure_future(self._pump(connection, reader, far_writer)),
            asyncio.ensure_future(self._pump(connection, far_reader, writer)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._connections.discard(connection)
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            far_writer.close()
            writer.close()

    async def _pump(self, connection: _Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(CHUNK):
            pause = self._delay_s + (len(data) / self._bytes_per_s if self._bytes_per_s else 0.0)
            if pause:
                await asyncio.sleep(pause)
                self.bytes_delayed += len(data)
            writer.write(data)
            await writer.drain()
            connection.forwarded += len(data)
            self.bytes_forwarded += len(data)

    async def _cut(self, client_pid: int | None) -> Reset:
        meant = self._of(client_pid)
        for connection in meant:
            for end in (connection.client, connection.server):
                with contextlib.suppress(OSError):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            for writer in connection.writers:
                writer.transport.abort()
        return Reset(len(meant), sum(c.forwarded for c in meant))

    def _of(self, client_pid: int | None) -> list[_Connection]:
        connections = list(self._connections)
        if client_pid is None:
            return connections
        ports = local_ports(client_pid, self.port)
        return [c for c in connections if c.client_port in ports]

    async def _stop(self) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def local_ports(pid: int, remote_port: int) -> set[int]:
    """From which local ports a process is connected to that remote port. Linux: reads /proc."""
    inodes = set()
    with contextlib.suppress(FileNotFoundError):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                inodes.add(os.readlink(fd).removeprefix("socket:[").removesuffix("]"))
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in inodes and int(fields[2].rpartition(":")[2], 16) == remote_port:
                ports.add(int(fields[1].rpartition(":")[2], 16))
    return ports
