"""A worker dies in the middle of things, the other one of its role lives: the streams go on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from support.golden import Case
from support.injections import born_again, kill
from support.members import Members, members
from support.recorder import History, Judge, load
from support.recorder import until as until_true
from support.streams import case_of, prompt_of

pytestmark = pytest.mark.e2e

COMMON = ("--num-blocks", "128", "--step-tokens", "64", "--step-seconds", "0.004")
CASES = [
    case_of(40, 120, seed=1),
    Case(prompt_of(200, 2), 60, 7),
    case_of(17, 90, seed=3),
    Case(prompt_of(400, 4), 30, 8),
    case_of(1, 100, seed=5),
    Case(prompt_of(16, 6), 80, 9),
]


@pytest.fixture(scope="module", params=["nixl", "grpc"])
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Members]:
    """2 + 2 workers of the hash model."""
    with members(tmp_path_factory.mktemp("kills"), common=("--transport", request.param, *COMMON)) as cluster:
        yield cluster


@pytest.mark.parametrize("victim", ["p0", "d0", "p1", "d1"])
async def test_streams_outlive_a_killed_worker(cluster: Members, victim: str, verdict: Judge) -> None:
    history = History()
    async with load(cluster.target, CASES, 8, history):
        await until_true(lambda: sum(a.num_tokens for a in history.asked) > 200, "all is well under way")
        fault = await asyncio.to_thread(kill, cluster.view, cluster.workers[victim].pid)
        history.faults.append(fault)
        await asyncio.to_thread(cluster.revive, victim)
        assert (await asyncio.to_thread(born_again, cluster.view, fault, 10.0))["pid"] == cluster.workers[victim].pid
        await asyncio.to_thread(cluster.until_serving)
        served = len(history.asked)
        await until_true(lambda: len(history.asked) > served + 8, "new streams begin")
    assert verdict(history).exact > 8
    await asyncio.to_thread(cluster.until_quiet)
