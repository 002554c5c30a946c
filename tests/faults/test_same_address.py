"""Workers that come back at the same address as somebody new: nothing of the old life is used, and nobody else ends."""

from __future__ import annotations

import asyncio

import pytest
from support.golden import Case
from support.injections import restart
from support.members import Members
from support.recorder import History, Judge, Recorder, load, under_way
from support.streams import mixed_cases, prompt_of

pytestmark = pytest.mark.e2e

POOLS = (96, 160, 112, 144, 128)
"""Sizes that decode comes back with: other base addresses, other numbers of blocks; the last is as at first."""


async def ask_all(cluster: Members, history: History, seed: int) -> None:
    """Twenty requests at once, of every length around a block, greedy and seeded."""
    lengths = (1, 15, 16, 17, 100)
    async with Recorder(cluster.target, history) as recorder:
        cases = [Case(prompt_of(n, 1000 * seed + s), 8, s if s % 2 else None) for n in lengths for s in range(4)]
        await asyncio.gather(*(recorder.ask(case) for case in cases))


@pytest.mark.parametrize("relay", ["nixl", "grpc"], indirect=True, scope="session")
async def test_after_each_of_five_restarts_of_decode_twenty_requests_are_exact(
    cluster: Members, verdict: Judge
) -> None:
    await restart_five_times(cluster, "d1", verdict)


@pytest.mark.parametrize("relay", ["nixl"], indirect=True, scope="session")
async def test_after_each_of_five_restarts_of_prefill_twenty_requests_are_exact(
    cluster: Members, verdict: Judge
) -> None:
    await restart_five_times(cluster, "p1", verdict)


async def restart_five_times(cluster: Members, who: str, verdict: Judge) -> None:
    """Each restart hits streams under way; the processes that others depend on live on."""
    before = {w["id"]: w["incarnation"] for w in cluster.view.workers() if w["id"] != who}
    for turn, blocks in enumerate(POOLS):
        disturbed, after = History(), History()
        async with load(cluster.target, mixed_cases(), 4, disturbed):
            await under_way(disturbed, 40)
            flags = ("--num-blocks", str(blocks)) if who == "d1" else ()
            disturbed.faults.append(await asyncio.to_thread(restart, cluster.view, cluster.workers[who], *flags))
        verdict(disturbed)
        await ask_all(cluster, after, turn)
        assert verdict(after).exact == 20
    assert {w["id"]: w["incarnation"] for w in cluster.view.workers() if w["id"] != who} == before
    await asyncio.to_thread(cluster.until_quiet)
