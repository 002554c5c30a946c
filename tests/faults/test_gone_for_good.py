"""Coordinators and clients that die: what they had open is let go of, what others have open goes on."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from support.cluster import is_alive
from support.golden import Case
from support.injections import kill_client, kill_coordinator
from support.members import Members, members
from support.recorder import History, Judge, goes_on, load, under_way
from support.streams import mixed_cases, prompt_of

pytestmark = pytest.mark.e2e

COMMON = ("--num-blocks", "128", "--step-tokens", "64", "--step-seconds", "0.01")
CLIENT = """
import asyncio, sys
from kvrelay.client import AsyncClient

async def one(client, seed):
    options = dict(max_tokens=600, temperature=0.0, ignore_eos=True)
    async for token in client.generate([seed, 2, 3], **options):
        if token.index == 5:
            print("begun", flush=True)

async def main():
    async with AsyncClient(sys.argv[1]) as client:
        await asyncio.gather(*(one(client, seed) for seed in range(int(sys.argv[2]))))

asyncio.run(main())
"""


@pytest.fixture(params=["nixl", "grpc"])
def cluster_of_two_coordinators(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Members]:
    with members(
        tmp_path, prefill=1, decode=1, coordinators=2, common=("--transport", request.param, *COMMON)
    ) as cluster:
        yield cluster


async def test_a_killed_coordinator_leaves_no_block_behind_and_the_other_one_notices_nothing(
    cluster_of_two_coordinators: Members, verdict: Judge
) -> None:
    cluster = cluster_of_two_coordinators
    doomed, living = History(), History()
    first, second = cluster.coordinators
    async with load(second.address, mixed_cases(), 4, living):
        async with load(first.address, [Case(prompt_of(300, s), 300, None) for s in range(4)], 4, doomed):
            await under_way(doomed)
            fault = await asyncio.to_thread(kill_coordinator, cluster.views[0], first.pid, cluster.views[1])
            doomed.faults.append(fault)
        await goes_on(living, 4)
    ended = verdict(doomed, counts=False)
    assert ended.unavailable >= 4
    assert verdict(living).unavailable == 0
    assert [s.name for s in living.streams if s.finish and s.finish.migrations] == []
    cluster.forget_coordinator(0)
    await asyncio.to_thread(cluster.until_quiet)


@pytest.mark.parametrize("relay", ["nixl", "grpc"], indirect=True, scope="session")
async def test_clients_that_vanish_in_the_middle_of_their_streams_leave_nothing_behind(
    cluster: Members, verdict: Judge
) -> None:
    history = History()
    async with load(cluster.target, mixed_cases(), 3, history):
        command = (sys.executable, "-c", CLIENT, cluster.target, "4")
        client = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        try:
            assert client.stdout
            begun = [await client.stdout.readline() for _ in range(4)]
            assert begun == [b"begun\n"] * 4
            history.faults.append(await asyncio.to_thread(kill_client, cluster.view, client.pid, 4))
        finally:
            with suppress(ProcessLookupError):
                client.kill()
            await client.wait()
        await goes_on(history, 4)
    assert verdict(history).unavailable == 0
    await asyncio.to_thread(cluster.until_quiet)
    assert all(is_alive(pid) for pid in cluster.pids().values())
