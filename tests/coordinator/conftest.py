"""A coordinator over real gRPC, and one with a fake worker of each role."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from support.door import Door, Pairs, join, opened
from support.fake_workers import FakeWorker

from kvrelay.requests import Role


@pytest_asyncio.fixture
async def door(request: pytest.FixtureRequest) -> AsyncIterator[Door]:
    async with opened(**getattr(request, "param", {})) as door:
        yield door


@pytest_asyncio.fixture
async def pair(door: Door) -> AsyncIterator[tuple[FakeWorker, FakeWorker]]:
    async with FakeWorker(Role.PREFILL, "p0") as prefill, FakeWorker(Role.DECODE, "d0") as decode:
        await join(door, prefill, decode)
        yield prefill, decode


@pytest_asyncio.fixture
async def pairs(door: Door) -> AsyncIterator[Pairs]:
    """p0, p1, d0, d1; of each role the first one is taken first."""
    async with (
        FakeWorker(Role.PREFILL, "p0") as p0,
        FakeWorker(Role.PREFILL, "p1") as p1,
        FakeWorker(Role.DECODE, "d0") as d0,
        FakeWorker(Role.DECODE, "d1") as d1,
    ):
        await join(door, p0, p1, d0, d1)
        yield p0, p1, d0, d1
