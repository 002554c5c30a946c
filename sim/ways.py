"""How a simulated worker reaches others, in the shapes that its links, hub and registration expect of a wire."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from kvrelay.errors import Unavailable
from kvrelay.link import ToDecode
from kvrelay.rpc.announce import ANNOUNCE_TIMEOUT_S, Announcer
from kvrelay.session import WorkerDescription
from sim.network import Broken, End, Network
from sim.world import Node


class Ways:
    """Calls out of one node."""

    def __init__(self, net: Network, node: Node) -> None:
        self._net, self._node = net, node

    @asynccontextmanager
    async def link(self, address: str) -> AsyncIterator[LinkCall]:
        end = await self._net.connect(self._node, address, "link")
        try:
            yield LinkCall(end)
        finally:
            end.close()

    @asynccontextmanager
    async def announcer(self, address: str) -> AsyncIterator[Announcer]:
        async def announce(description: WorkerDescription, leaving: bool) -> str:
            end = await self._net.connect(self._node, address, "announce")
            try:
                async with asyncio.timeout(ANNOUNCE_TIMEOUT_S):
                    await end.write((description, leaving))
                    return str(await end.read())
            except TimeoutError:
                raise Unavailable("no answer to the announcement") from None
            finally:
                end.close()

        yield announce


async def requests_of(end: End) -> AsyncIterator[Any]:
    """What a server's handler reads: a lost connection looks like an end to it, and it is cancelled as well."""
    try:
        while (message := await end.read()) is not None:
            yield message
    except Broken:
        return


async def answers_of(end: End) -> AsyncIterator[Any]:
    """What a caller reads: a lost connection is an error."""
    while (message := await end.read()) is not None:
        yield message


class LinkCall:
    def __init__(self, end: End) -> None:
        self._end = end

    async def write(self, message: ToDecode) -> None:
        await self._end.write(message)

    def messages(self) -> AsyncIterator[Any]:
        return answers_of(self._end)
