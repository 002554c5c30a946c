"""A coordinator with both doors, and one with a fake worker of each role."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from support.door import MODEL, Door
from support.http_door import HttpDoor

from coordinator.main import Coordinator
from kvrelay.config import CoordinatorConfig
from kvrelay.rpc.channel import open_channel


@pytest_asyncio.fixture
async def door(request: pytest.FixtureRequest) -> AsyncIterator[Door]:
    """As everywhere in these tests, with the OpenAI door beside it."""
    changes = getattr(request, "param", {})
    config = CoordinatorConfig(listen="127.0.0.1:0", http="127.0.0.1:0", executor="hash", **changes)
    coordinator = Coordinator(config, MODEL)
    address = await coordinator.start()
    async with open_channel(address) as channel:
        yield Door(coordinator, address, channel)
    await coordinator.stop(0)


@pytest_asyncio.fixture
async def http(door: Door) -> HttpDoor:
    return HttpDoor(door)
