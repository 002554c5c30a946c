"""A prefill and a decode core that talk to each other, over either transport."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.pair import Pair


@pytest.fixture(params=["nixl", "grpc"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def pair(transport: str) -> Iterator[Pair]:
    made = Pair(transport=transport)
    yield made
    made.close()
