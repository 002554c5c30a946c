"""The line between a prefill and a decode worker is cut or slow while blocks go over it; both workers live."""

from __future__ import annotations

import asyncio
import random

import pytest
from support.injections import cut, slowed
from support.members import Members, wait
from support.proxy import Proxy
from support.recorder import History, Judge, goes_on, load, under_way
from support.streams import new_and_known

pytestmark = [pytest.mark.e2e, pytest.mark.parametrize("relay", ["nixl", "grpc"], indirect=True, scope="session")]


async def test_links_cut_in_the_middle_of_hand_offs_cost_no_stream(cluster: Members, verdict: Judge) -> None:
    """Only the prefill workers' links: the coordinator's session with d0 goes through the same proxy and lives."""
    history, rng = History(), random.Random(1)
    proxy = cluster.proxies["d0"]
    before = {w["id"]: w["incarnation"] for w in cluster.view.workers()}
    async with load(cluster.target, new_and_known(), 6, history):
        await under_way(history)
        for turn in range(8):
            prefill = cluster.workers[f"p{turn % 2}"].pid
            await asyncio.to_thread(until_connected, proxy, prefill)
            await asyncio.sleep(rng.uniform(0.05, 0.3))
            history.faults.append(await asyncio.to_thread(cut, proxy, prefill))
        await goes_on(history)
    assert verdict(history).exact >= 16
    assert {w["id"]: w["incarnation"] for w in cluster.view.workers()} == before
    await asyncio.to_thread(cluster.until_quiet)


def until_connected(proxy: Proxy, pid: int) -> None:
    wait(lambda: proxy.num_connections(pid) > 0, "the link is there again")


async def test_a_slow_line_costs_no_stream(cluster: Members, verdict: Judge) -> None:
    history = History()
    proxy = cluster.proxies["d0"]
    async with load(cluster.target, new_and_known(), 6, history):
        with slowed(proxy, history.faults, delay_s=0.05, bytes_per_s=200_000):
            await under_way(history)
            await goes_on(history)
    assert verdict(history).unavailable == 0
    assert [s.name for s in history.streams if s.finish and s.finish.migrations] == []
    await asyncio.to_thread(cluster.until_quiet)
