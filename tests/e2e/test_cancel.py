"""A client that leaves, at any moment: everything it had is given back, and nobody else notices."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.cluster import Cluster, running_cluster, standing_still
from support.golden import Case
from support.streams import assert_exact, case_of, neighbour, stream_of

from kvrelay.client import AsyncClient, AsyncStream
from kvrelay.errors import Cancelled, DeadlineExceeded

pytestmark = pytest.mark.e2e

STEP_S = 0.05
STEP_TOKENS = 32
NUM_BLOCKS = 48
FLAGS = ("--executor", "hash", "--num-blocks", str(NUM_BLOCKS))
SLOW = ("--step-tokens", str(STEP_TOKENS), "--step-seconds", str(STEP_S))
BESIDE = case_of(20, 18, seed=1)
"""Runs beside what is cancelled: 0.9 s of decode steps."""


def long_case(seed: int) -> Case:
    """20 chunks, so one second of prefill: for one test only, as the next would find it cached."""
    return case_of(640, 8, seed)


@pytest.fixture(scope="module", params=["nixl", "grpc"])
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    log = tmp_path_factory.mktemp("cancel") / "log"
    with running_cluster(log, *FLAGS, *SLOW, "--transport", request.param) as cluster:
        yield cluster


@asynccontextmanager
async def asked(client: AsyncClient, case: Case) -> AsyncIterator[AsyncStream]:
    """A request under way; leaving the block cancels its call, as a client that goes does."""
    stream = stream_of(client, case)

    async def read() -> None:
        async for _ in stream:
            pass

    reading = asyncio.create_task(read())
    try:
        yield stream
        assert not reading.done(), "the request ended before it was cancelled"
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


async def until_seen(client: AsyncClient, condition: Callable[[dict[str, Any]], bool], what: str) -> None:
    """Wait until the topology, with its workers by role, satisfies the condition."""
    ends_at = time.monotonic() + 10.0
    while True:
        topology = await client.topology()
        seen = {**topology, **{w["role"]: w for w in topology["workers"]}}
        if condition(seen):
            return
        assert time.monotonic() < ends_at, f"not seen: {what}: {seen}"
        await asyncio.sleep(0.02)  # a poll, bounded above


def reserved(seen: dict[str, Any]) -> int:
    return int(seen["decode"]["blocks"]["reserved"])


async def test_a_client_that_leaves_while_queued_at_the_coordinator(cluster: Cluster) -> None:
    async with AsyncClient(cluster.target) as client:
        first = asyncio.create_task(assert_exact(cluster.target, long_case(2)))
        await until_seen(client, lambda seen: seen["open_requests"] == 1, "the first is in")
        async with asked(client, case_of(100, 4, seed=3)):
            await until_seen(client, lambda seen: seen["queued_requests"] == 1, "the second waits for its turn")
        await until_seen(client, lambda seen: seen["queued_requests"] == 0, "the second is gone")
        await first
    cluster.until_nothing_is_held()


async def test_a_client_that_leaves_while_waiting_for_blocks_at_decode(cluster: Cluster) -> None:
    """The holder fills 16 of 48 blocks and is about to need one more, so that 32 free ones are one too few."""
    holder, big = case_of(241, 40, seed=4), case_of(32 * 16 - 1, 4, seed=5)
    async with neighbour(cluster.target, holder), AsyncClient(cluster.target) as client:
        async with asked(client, big):
            await until_seen(client, lambda seen: seen["decode"]["waiting"] == 1, "decode has no room")
        await until_seen(client, lambda seen: seen["decode"]["waiting"] == 0, "decode forgot it")
    cluster.until_nothing_is_held()


async def test_a_client_that_leaves_while_its_prompt_waits_at_prefill(cluster: Cluster) -> None:
    """Prefill stands still for a moment: it finds the prompt and its end in its mailbox at once."""
    pid = cluster.pids()["prefill-0"]
    async with neighbour(cluster.target, BESIDE), AsyncClient(cluster.target) as client:
        await until_seen(client, lambda seen: seen["decode"]["running"] == 1, "the neighbour needs prefill no more")
        with standing_still(pid):
            async with asked(client, long_case(20)):
                await until_seen(client, lambda seen: reserved(seen) >= 41, "decode promised")
        await until_seen(client, lambda seen: reserved(seen) < 41, "the promise is void")
    cluster.until_nothing_is_held()


async def test_a_client_that_leaves_in_prefill(cluster: Cluster) -> None:
    case = long_case(21)
    async with neighbour(cluster.target, BESIDE), AsyncClient(cluster.target) as client, asked(client, case) as stream:
        await until_seen(client, lambda seen: seen["prefill"]["queued_tokens"] > 100, "it is computed")
        assert not stream.tokens
    cluster.until_nothing_is_held()


async def test_a_client_that_leaves_in_transfer(cluster: Cluster) -> None:
    """Decode stands still, so nothing that is on its way can land; the neighbour's stream just pauses."""
    pid = cluster.pids()["decode-0"]
    async with neighbour(cluster.target, BESIDE), AsyncClient(cluster.target) as client:
        stream = stream_of(client, case_of(256, 64, seed=8))
        reading = asyncio.create_task(stream.collect())
        await until_seen(client, lambda seen: reserved(seen) >= 17, "decode promised")
        with standing_still(pid):
            await until_seen(client, lambda _: bool(stream.tokens) or reading.done(), "prefill is done")
            await until_seen(client, lambda seen: seen["prefill"]["transfers_in_flight"] > 0, "the hand-off is open")
            stream.cancel()
            (error,) = await asyncio.gather(reading, return_exceptions=True)
            assert isinstance(error, Cancelled), error
        assert [t.index for t in stream.tokens] == [0]
    cluster.until_nothing_is_held()


async def test_a_client_that_leaves_while_decoding(cluster: Cluster) -> None:
    async with neighbour(cluster.target, BESIDE), AsyncClient(cluster.target) as client:
        stream = stream_of(client, case_of(20, 700, seed=6))
        async for token in stream:
            if token.index == 5:
                break
        await until_seen(client, lambda seen: seen["decode"]["running"] <= 1, "decode forgot it")
    cluster.until_nothing_is_held()


async def test_a_deadline_ends_a_long_request_and_frees_everything(cluster: Cluster) -> None:
    async with neighbour(cluster.target, BESIDE), AsyncClient(cluster.target) as client:
        with pytest.raises(DeadlineExceeded):
            await client.generate(list(long_case(22).prompt), max_tokens=64, ignore_eos=True, deadline_s=0.15).collect()
    cluster.until_nothing_is_held()


async def test_a_client_process_that_is_killed_leaves_nothing(cluster: Cluster, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.json"
    tokens.write_text(json.dumps(BESIDE.prompt))
    argv = ["generate", "--target", cluster.target, "--tokens", str(tokens), "--max-tokens", "700", "--ignore-eos"]
    async with neighbour(cluster.target, BESIDE), AsyncClient(cluster.target) as client:
        command = (sys.executable, "-m", "kvrelay.cli.main", *argv)
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL)
        try:
            await until_seen(client, lambda seen: seen["decode"]["running"] == 2, "both are decoded")
        finally:
            process.kill()
        assert await process.wait() == -signal.SIGKILL
        await until_seen(client, lambda seen: seen["decode"]["running"] <= 1, "decode forgot it")
    cluster.until_nothing_is_held()


async def test_a_hundred_clients_that_leave_at_random_moments(cluster: Cluster) -> None:
    """Two waves of 50: queued, waiting, in prefill, in transfer and decoding, all at once."""
    rng = random.Random(7)
    left = 0

    async def leave_at(client: AsyncClient, case: Case, after_s: float) -> bool:
        try:
            async with asyncio.timeout(after_s):
                await stream_of(client, case).collect()
        except TimeoutError:
            return True
        return False

    async with neighbour(cluster.target, BESIDE), AsyncClient(cluster.target) as client:
        for _ in range(2):
            cases = [case_of(rng.choice((1, 15, 40, 100)), 24, rng.randrange(1000)) for _ in range(50)]
            left += sum(await asyncio.gather(*(leave_at(client, case, rng.uniform(0, 0.9)) for case in cases)))
    assert left > 60
    cluster.until_nothing_is_held()
    await assert_exact(cluster.target, BESIDE, case_of(100, 8))
