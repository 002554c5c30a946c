"""Processes that stand still: a second ends nothing; five seconds end no stream, they make it wait or move."""

from __future__ import annotations

import asyncio

import pytest
from support.injections import no_answer_of, pause, silence_of
from support.members import Members
from support.recorder import History, Judge, goes_on, load, under_way
from support.streams import mixed_cases

pytestmark = [pytest.mark.e2e, pytest.mark.parametrize("relay", ["nixl"], indirect=True, scope="session")]


@pytest.mark.parametrize("who", ["p0", "d0", "coordinator"])
async def test_a_pause_of_a_second_ends_nothing_and_moves_nothing(cluster: Members, who: str, verdict: Judge) -> None:
    history = History()
    before = {w["id"]: w["incarnation"] for w in cluster.view.workers()}
    pid = cluster.coordinators[0].pid if who == "coordinator" else cluster.workers[who].pid
    felt = no_answer_of(cluster.target) if who == "coordinator" else silence_of(cluster.view, pid, 0.5)
    async with load(cluster.target, mixed_cases(), 4, history):
        await under_way(history)
        history.faults.append(await asyncio.to_thread(pause, pid, 1.0, felt))
        await goes_on(history)
    seen = verdict(history)
    assert seen.unavailable == 0
    assert [s.name for s in history.streams if s.finish and s.finish.migrations] == []
    assert {w["id"]: w["incarnation"] for w in cluster.view.workers()} == before
    await asyncio.to_thread(cluster.until_quiet)


async def test_a_decode_worker_that_stands_still_for_five_seconds_costs_no_stream(
    cluster: Members, verdict: Judge
) -> None:
    history = History()
    pid = cluster.workers["d0"].pid
    async with load(cluster.target, mixed_cases(), 4, history):
        await under_way(history)
        felt = silence_of(cluster.view, pid, 2.0)
        history.faults.append(await asyncio.to_thread(pause, pid, 5.0, felt))
        await asyncio.to_thread(cluster.until_serving)
        await goes_on(history)
    assert verdict(history).unavailable == 0
    await asyncio.to_thread(cluster.until_quiet)
