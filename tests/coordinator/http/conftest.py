"""A coordinator with both doors, and one with a fake worker of each role."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from support.door import Door, opened
from support.http_door import HttpDoor


@pytest_asyncio.fixture
async def door(request: pytest.FixtureRequest) -> AsyncIterator[Door]:
    """As everywhere in these tests, with the OpenAI door beside it."""
    async with opened(http="127.0.0.1:0", **getattr(request, "param", {})) as door:
        yield door


@pytest_asyncio.fixture
async def http(door: Door) -> HttpDoor:
    return HttpDoor(door)
