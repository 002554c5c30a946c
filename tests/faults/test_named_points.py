"""A worker dies at a named point of our own code, one after another: wherever it dies, its streams go on."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support.injections import obeyed, order
from support.members import Members
from support.recorder import History, Judge, goes_on, load
from support.streams import mixed_cases

pytestmark = [pytest.mark.e2e, pytest.mark.parametrize("relay", ["nixl"], indirect=True, scope="session")]

POINTS = {
    "d1": ["decode.reserved", "decode.landed", "decode.started", "decode.step"],
    "p1": ["prefill.taken", "prefill.chunk", "prefill.part", "prefill.sampled", "prefill.pushed"],
}
NTH = 3


@pytest.mark.parametrize("victim", ["d1", "p1"])
async def test_a_worker_that_dies_at_one_point_after_another_costs_no_stream(
    cluster: Members, victim: str, tmp_path: Path, verdict: Judge
) -> None:
    """Each life but the last has the order to die at the next point."""
    history = History()
    async with load(cluster.target, mixed_cases(), 4, history):
        for point in POINTS[victim]:
            env = order(tmp_path, point, "kill", NTH)
            await asyncio.to_thread(cluster.revive, victim, env=env)
            history.faults.append(await asyncio.to_thread(obeyed, env, cluster.workers[victim].pid, 20.0))
        await asyncio.to_thread(cluster.revive, victim)
        await asyncio.to_thread(cluster.until_serving)
        await goes_on(history)
    assert len(history.faults) == len(POINTS[victim])
    assert verdict(history).exact >= 16
    await asyncio.to_thread(cluster.until_quiet)
