"""More than fits: small pools, bursts, clients that leave in masses. Slower is fine; wrong, stuck or leaking is not."""

from __future__ import annotations

import asyncio
import random

import pytest
from support.cluster import Cluster
from support.golden import Case
from support.streams import assert_exact, case_of, stream_of

from kvrelay.client import AsyncClient
from kvrelay.errors import ResourceExhausted

pytestmark = pytest.mark.e2e


def preemptions(cluster: Cluster) -> int:
    return sum(w["counters"].get("preempted", 0) for w in cluster.topology() if w["role"] == "decode")


async def leave_after(client: AsyncClient, case: Case, seconds: float) -> bool:
    """Whether the client left before its answer was complete."""
    try:
        async with asyncio.timeout(seconds):
            await stream_of(client, case).collect()
    except TimeoutError:
        return True
    except ResourceExhausted:
        return False
    return False


async def test_sequences_preempted_after_their_blocks_came_are_exact(hash_cluster: Cluster) -> None:
    """Six that grow to 35 blocks each, in a pool of 64."""
    before = preemptions(hash_cluster)
    await assert_exact(hash_cluster.target, *(case_of(60, 500, seed=s) for s in range(6)))
    hash_cluster.until("decode preempted", lambda _: preemptions(hash_cluster) > before)
    hash_cluster.until_nothing_is_held()


async def test_prompts_that_fill_most_of_the_pool_do_not_block_each_other_for_ever(hash_cluster: Cluster) -> None:
    await assert_exact(hash_cluster.target, *(case_of(640, 20, seed=s) for s in range(12)), case_of(3, 20))
    hash_cluster.until_nothing_is_held()


async def test_a_burst_of_long_prompts_that_all_leave_spoils_nothing(hash_cluster: Cluster) -> None:
    rng = random.Random(3)
    before = hash_cluster.pids()
    async with AsyncClient(hash_cluster.target) as client:
        leaving = [leave_after(client, case_of(800, 20, seed=s), rng.uniform(0, 1)) for s in range(200)]
        assert sum(await asyncio.gather(*leaving)) > 100
    await assert_exact(hash_cluster.target, *(case_of(rng.choice((1, 16, 100)), 8, seed=s) for s in range(50)))
    hash_cluster.until_nothing_is_held()
    assert hash_cluster.pids() == before


async def test_clients_that_leave_around_the_end_of_prefill_free_everything(hash_cluster: Cluster) -> None:
    """Delays in steps of a millisecond, over the time in which the hand-off ends and decode begins."""
    before = hash_cluster.pids()
    async with AsyncClient(hash_cluster.target) as client:
        for after_ms in range(0, 60, 4):
            cases = [case_of(67, 20, seed=after_ms + i) for i in range(4)]
            await asyncio.gather(*(leave_after(client, c, (after_ms + i) / 1000) for i, c in enumerate(cases)))
    hash_cluster.until_nothing_is_held()
    assert hash_cluster.pids() == before
    await assert_exact(hash_cluster.target, case_of(67, 20))
