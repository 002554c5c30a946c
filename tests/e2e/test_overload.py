"""More than can be served at once: refused with a hint or answered exactly, and nobody pays for the others."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import pytest
from support.cluster import Cluster, running_cluster
from support.golden import Case
from support.streams import answer_of, assert_exact, case_of, neighbour, stream_of

from kvrelay.client import AsyncClient
from kvrelay.client.request import GENERATE, generate_request
from kvrelay.errors import KVRelayError, ResourceExhausted
from kvrelay.rpc.status import from_rpc_error

pytestmark = pytest.mark.e2e

QUEUE_LIMIT = 16
SLOW_READER_BYTES = 16 * 1024
NUM_BLOCKS = 96
CONTEXT = NUM_BLOCKS * 16
FLAGS = ("--executor", "hash", "--transport", "grpc", "--num-blocks", str(NUM_BLOCKS), "--step-seconds", "0.01")
ROWS = ("--step-tokens", "256", "--max-sequences", "8")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVRELAY_QUEUE_LIMIT", str(QUEUE_LIMIT))
        patch.setenv("KVRELAY_SLOW_READER_BYTES", str(SLOW_READER_BYTES))
        with running_cluster(tmp_path_factory.mktemp("overload") / "log", *FLAGS, *ROWS) as cluster:
            yield cluster


async def all_at_once(target: str, cases: list[Case]) -> list[tuple[int, ...] | KVRelayError]:
    """The tokens of each, or its error."""

    async def ask(client: AsyncClient, case: Case) -> tuple[int, ...] | KVRelayError:
        try:
            return (await stream_of(client, case).collect()).token_ids
        except KVRelayError as error:
            return error

    async with AsyncClient(target) as client:
        return list(await asyncio.gather(*(ask(client, case) for case in cases)))


def judge(cases: list[Case], answers: list[tuple[int, ...] | KVRelayError]) -> tuple[int, int]:
    """(exact, refused); anything else fails."""
    refused = [answer for answer in answers if isinstance(answer, KVRelayError)]
    assert {type(error) for error in refused} <= {ResourceExhausted}
    assert {error.retry_after_s for error in refused} <= {1.0}
    exact = [c for c, a in zip(cases, answers, strict=True) if not isinstance(a, KVRelayError) and a == answer_of(c)]
    assert len(exact) + len(refused) == len(cases)
    return len(exact), len(refused)


async def test_a_full_queue_refuses_with_a_hint_and_what_runs_stays_exact(cluster: Cluster) -> None:
    async with neighbour(cluster.target, case_of(20, 60, seed=1)):
        cases = [case_of(20, 12, seed=s) for s in range(80)]
        exact, refused = judge(cases, await all_at_once(cluster.target, cases))
    assert exact >= QUEUE_LIMIT
    assert refused > 0
    cluster.until_nothing_is_held()


async def test_a_burst_of_the_largest_requests_kills_nothing(cluster: Cluster) -> None:
    """Each needs the whole pool of either worker."""
    before = cluster.pids()
    cases = [case_of(CONTEXT - 3, 3, seed=s % 4) for s in range(10 * QUEUE_LIMIT)]
    exact, refused = judge(cases, await all_at_once(cluster.target, cases))
    assert exact >= QUEUE_LIMIT
    assert refused > 0
    assert cluster.pids() == before
    cluster.until_nothing_is_held()


async def test_a_big_request_lets_small_ones_pass_and_gets_its_turn(cluster: Cluster) -> None:
    """Three small ones at a time never stop coming and hold 6 blocks at least; the big one leaves 4."""
    big, small = case_of(1470, 8, seed=1), case_of(30, 40, seed=2)
    begun = asyncio.Event()

    async def ask_big(client: AsyncClient) -> tuple[int, ...]:
        stream = stream_of(client, big)
        async for _ in stream:
            begun.set()
        return stream.result.token_ids

    async with AsyncExitStack() as stack:
        beside = [await stack.enter_async_context(neighbour(cluster.target, small)) for _ in range(3)]
        client = await stack.enter_async_context(AsyncClient(cluster.target))
        asking = asyncio.create_task(ask_big(client))
        async with asyncio.timeout(30):
            await begun.wait()
        passed = sum(one.answered for one in beside)
        assert await asking == answer_of(big)
    assert passed > 0
    cluster.until_nothing_is_held()


async def test_a_reader_that_reads_nothing_is_cut_and_costs_bounded_memory(cluster: Cluster) -> None:
    """Its stream backs up to the coordinator, which ends it; a neighbour's goes on."""
    coordinator = coordinator_of(cluster)
    before = rss_mib(coordinator)
    request = generate_request([1, 2, 3], {"max_tokens": CONTEXT - 3, "temperature": 0.0, "ignore_eos": True})
    small_window = [
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", 1024),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    async with neighbour(cluster.target, case_of(20, 60, seed=3)) as beside:
        channel = grpc.aio.insecure_channel(cluster.target, options=small_window)
        calls = [channel.unary_stream(GENERATE)(request.SerializeToString()) for _ in range(4)]
        for call in calls:
            await call.read()  # that it was accepted; nothing more
        answered = beside.answered
        await until_only_the_neighbour_runs(cluster)
        assert beside.answered > answered
        for call in calls:
            assert isinstance(await end_of(call), ResourceExhausted)
        await channel.close()
    assert rss_mib(coordinator) - before < 16
    cluster.until_nothing_is_held()


async def end_of(call: grpc.aio.UnaryStreamCall[bytes, bytes]) -> KVRelayError | None:
    """Reads what is left; the error that it ends with."""
    try:
        while await call.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error)
    return None


async def until_only_the_neighbour_runs(cluster: Cluster) -> None:
    async with AsyncClient(cluster.target) as client, asyncio.timeout(40):
        while (await client.topology())["open_requests"] > 1:  # noqa: ASYNC110  # another process: no event
            await asyncio.sleep(0.05)  # a poll, bounded above


def coordinator_of(cluster: Cluster) -> int:
    """Its process id: the supervisor's child that is no worker."""
    tasks = Path(f"/proc/{cluster.process.pid}/task").iterdir()
    children = {int(pid) for task in tasks for pid in (task / "children").read_text().split()}
    (coordinator,) = children - set(cluster.pids().values())
    return coordinator


def rss_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / 2**20


async def test_an_idle_cluster_is_as_before(cluster: Cluster) -> None:
    await assert_exact(cluster.target, case_of(20, 12, seed=9))
