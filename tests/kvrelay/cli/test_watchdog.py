"""The watchdog: a process that answers is left alone, one that is silent is named once to be killed."""

from __future__ import annotations

import asyncio
import socket

from kvrelay.cli.cluster import Reached
from kvrelay.cli.watchdog import watch
from kvrelay.rpc.server import RpcServer


async def test_one_that_says_for_long_that_it_is_not_well_is_killed() -> None:
    killed: asyncio.Queue[tuple[str, int]] = asyncio.Queue()
    server = RpcServer()
    port = server.bind("127.0.0.1:0")
    await server.start()
    members = {"stuck": Reached(3, f"127.0.0.1:{port}")}
    watching = asyncio.create_task(watch(lambda: members, lambda *who: killed.put_nowait(who), silent_s=2.0))
    try:
        await asyncio.sleep(2.5)  # it is well for longer than a silence that would be acted on
        assert killed.empty()
        await server.set_ready(False, "")
        async with asyncio.timeout(20):
            assert await killed.get() == ("stuck", 3)
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await server.stop(0)


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
