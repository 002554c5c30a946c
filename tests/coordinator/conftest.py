"""A coordinator over real gRPC, and one with a fake worker of each role."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from support.door import MODEL, Door, join
from support.fake_workers import FakeWorker

from coordinator.main import Coordinator
from kvrelay.config import CoordinatorConfig
from kvrelay.requests import Role
from kvrelay.rpc.channel import open_channel


@pytest_asyncio.fixture
async def door(request: pytest.FixtureRequest) -> AsyncIterator[Door]:
    changes = getattr(request, "param", {})
    config = CoordinatorConfig(listen="127.0.0.1:0", executor="hash", **changes)
    coordinator = Coordinator(config, MODEL)
    address = await coordinator.start()
    async with open_channel(address) as channel:
        yield Door(coordinator, address, channel)
    await coordinator.stop(0)


@pytest_asyncio.fixture
async def pair(door: Door) -> AsyncIterator[tuple[FakeWorker, FakeWorker]]:
    async with FakeWorker(Role.PREFILL, "p0") as prefill, FakeWorker(Role.DECODE, "d0") as decode:
        await join(door, prefill, decode)
        yield prefill, decode
