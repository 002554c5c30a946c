"""The watchdog: a process that answers is left alone, one that is silent is named once to be killed."""

from __future__ import annotations

import asyncio
import socket

from kvrelay.cli.cluster import Reached
from kvrelay.cli.watchdog import watch
from kvrelay.rpc.server import RpcServer


async def test_the_silent_one_of_two_is_killed_and_only_it() -> None:
    killed: asyncio.Queue[tuple[str, int]] = asyncio.Queue()
    server = RpcServer()
    port = server.bind("127.0.0.1:0")
    await server.start()
    with socket.create_server(("127.0.0.1", 0)) as mute:  # the kernel takes the connection, nobody reads it
        members = {
            "well": Reached(1, f"127.0.0.1:{port}"),
            "hung": Reached(2, f"127.0.0.1:{mute.getsockname()[1]}"),
        }
        watching = asyncio.create_task(watch(lambda: members, lambda *who: killed.put_nowait(who), silent_s=2.0))
        try:
            async with asyncio.timeout(20):
                assert await killed.get() == ("hung", 2)
            del members["hung"]
            await asyncio.sleep(2.5)  # longer than a silence that would be acted on
            assert killed.empty()
            assert not watching.done()
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await server.stop(0)
