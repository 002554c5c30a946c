"""The grpc transport on virtual time: the same frames over the same links, sent by tasks."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from kvrelay.errors import Unavailable
from kvrelay.requests import Incarnation
from kvtransfer.store import BlockStore
from kvtransfer.transports.base import Part, TransportEvent, WriteDone, WriteFailed
from kvtransfer.transports.grpc import HOPELESS, frames
from sim.world import Node
from worker.link_client import LinkClient
from worker.transports import SEND_TIMEOUT_S


class Framed:
    """The transport port over links. notify: how the worker hears of a write's end."""

    name = "grpc"
    refuses_late = True

    def __init__(self, node: Node, store: BlockStore, notify: Callable[[TransportEvent], None]) -> None:
        self._node, self._store, self._notify = node, store, notify
        self._parts: dict[Incarnation, deque[Part]] = {}
        self._tasks: dict[Incarnation, asyncio.Task[None]] = {}
        self.client: LinkClient | None = None

    def add_peer(self, incarnation: Incarnation) -> None:
        pass

    def drop_peer(self, incarnation: Incarnation) -> None:
        self._give_up(incarnation, "the peer was dropped")

    def _give_up(self, incarnation: Incarnation, why: str) -> None:
        for part in self._parts.pop(incarnation, ()):
            self._notify(WriteFailed(part.peer, part.epoch, part.part, why, posted=False))

    def post(self, part: Part) -> None:
        self._parts.setdefault(part.peer, deque()).append(part)
        task = self._tasks.get(part.peer)
        if task is None or task.done():
            self._tasks[part.peer] = self._node.spawn(self._send(part.peer), "frames")

    async def _send(self, peer: Incarnation) -> None:
        while parts := self._parts.get(peer):
            self._notify(await self._write(parts.popleft()))

    async def _write(self, part: Part) -> TransportEvent:
        assert self.client is not None
        try:
            for message in frames(self._store, part):
                async with asyncio.timeout(SEND_TIMEOUT_S):
                    await self.client.send_bulk(part.peer, message)
                await asyncio.sleep(0.0)
        except TimeoutError as error:
            self._give_up(part.peer, HOPELESS)
            return WriteFailed(part.peer, part.epoch, part.part, str(error))
        except Unavailable as error:
            return WriteFailed(part.peer, part.epoch, part.part, str(error))
        return WriteDone(part.peer, part.epoch, part.part, 0.001)
