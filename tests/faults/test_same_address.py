"""Workers that come back at the same address as somebody new: nothing of the old life is used, and nobody else ends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.golden import Case
from support.injections import restart
from support.members import Members, members
from support.recorder import History, Judge, Recorder, load, under_way
from support.streams import mixed_cases, prompt_of

pytestmark = pytest.mark.e2e

POOLS = (96, 160, 112, 144, 128)
"""Sizes that decode comes back with: other base addresses, other numbers of blocks."""


@pytest.fixture
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Members]:
    common = ("--transport", request.param, "--num-blocks", "128", "--step-tokens", "64", "--step-seconds", "0.004")
    with members(tmp_path, prefill=1, decode=1, common=common) as cluster:
        yield cluster


async def ask_all(cluster: Members, history: History, seed: int) -> None:
    """Twenty requests at once, of every length around a block, greedy and seeded."""
    lengths = (1, 15, 16, 17, 100)
    async with Recorder(cluster.target, history) as recorder:
        cases = [Case(prompt_of(n, 1000 * seed + s), 8, s if s % 2 else None) for n in lengths for s in range(4)]
        await asyncio.gather(*(recorder.ask(case) for case in cases))


@pytest.mark.parametrize(("pair", "who"), [("nixl", "d0"), ("nixl", "p0"), ("grpc", "d0")], indirect=["pair"])
async def test_the_next_twenty_requests_after_each_of_five_restarts_are_exact(
    pair: Members, who: str, verdict: Judge
) -> None:
    """Each restart hits streams under way; with one worker a role they wait until it is back."""
    (survivor,) = set(pair.workers) - {who}
    living = pair.view.worker(survivor)
    assert living
    for turn, blocks in enumerate(POOLS):
        disturbed, after = History(), History()
        async with load(pair.target, mixed_cases(), 4, disturbed):
            await under_way(disturbed, 40)
            flags = ("--num-blocks", str(blocks)) if who == "d0" else ()
            disturbed.faults.append(await asyncio.to_thread(restart, pair.view, pair.workers[who], *flags))
        verdict(disturbed)
        await ask_all(pair, after, turn)
        assert verdict(after).exact == 20
    still = pair.view.worker(survivor)
    assert still
    assert (still["pid"], still["incarnation"]) == (living["pid"], living["incarnation"])
    await asyncio.to_thread(pair.until_quiet)
