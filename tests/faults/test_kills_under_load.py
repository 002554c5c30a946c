"""A worker dies in the middle of things, the other one of its role lives: the streams go on."""

from __future__ import annotations

import asyncio

import pytest
from support.injections import born_again, kill
from support.members import Members
from support.recorder import History, Judge, goes_on, load, under_way
from support.streams import new_and_known

pytestmark = [pytest.mark.e2e, pytest.mark.parametrize("relay", ["nixl", "grpc"], indirect=True, scope="session")]


@pytest.mark.parametrize("victim", ["p0", "d1"])
async def test_streams_outlive_a_killed_worker(cluster: Members, victim: str, verdict: Judge) -> None:
    history = History()
    others = {name: pid for name, pid in cluster.pids().items() if name != victim}
    async with load(cluster.target, new_and_known(), 6, history):
        await under_way(history)
        fault = await asyncio.to_thread(kill, cluster.view, cluster.workers[victim].pid)
        history.faults.append(fault)
        await asyncio.to_thread(cluster.revive, victim)
        old = fault.proof["incarnation"]
        known = await asyncio.to_thread(born_again, cluster.view, victim, old, 10.0)
        assert known["pid"] == cluster.workers[victim].pid
        await goes_on(history)
    assert verdict(history).exact >= 16
    assert {w["id"]: w["pid"] for w in cluster.view.workers() if w["id"] != victim} == others
    await asyncio.to_thread(cluster.until_quiet)
