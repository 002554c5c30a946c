"""Processes that die or stand still, at any moment, and come back: streams go on or end soon, all else goes on.

There is one worker of each role: a stream goes on if its worker is started again within the coordinator's grace.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.cluster import Cluster, is_alive, running_cluster, standing_still, start_cluster, until
from support.golden import Case
from support.processes import RoleProcess, role_process
from support.streams import answer_of, assert_exact, case_of, neighbour, stream_of

from kvrelay.client import AsyncClient, AsyncStream, Client
from kvrelay.errors import KVRelayError, Unavailable

pytestmark = pytest.mark.e2e

FLAGS = ("--executor", "hash", "--num-blocks", "96", "--step-tokens", "32", "--step-seconds", "0.02")
HEARD_WITHIN_S = 5.0
BUSY_S = 3.0
"""What a busy machine may add to the coordinator's grace."""
LONG = case_of(1000, 400, seed=1)
"""32 chunks: at least 0.6 s of prefill."""
LONGER = case_of(1400, 40, seed=1)
STREAMS = [case_of(40, 400, seed=s) for s in range(2, 6)]


@pytest.fixture(scope="module", params=["nixl", "grpc"])
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    log = tmp_path_factory.mktemp("lost") / "log"
    with running_cluster(log, *FLAGS, "--transport", request.param) as cluster:
        yield cluster


async def outcome_of(stream: AsyncStream, case: Case) -> str:
    """How a stream ends whose worker is killed: exact, or UNAVAILABLE after tokens that are right as far as they go."""
    try:
        await stream.collect()
    except Unavailable:
        tokens = tuple(t.token_id for t in stream.tokens)
        assert tokens == answer_of(case)[: len(tokens)]
        return "unavailable"
    assert stream.result.token_ids == answer_of(case)
    return "exact" if stream.result.migrations else "not moved"


async def failure_of(stream: AsyncStream, case: Case) -> None:
    """A stream that is to lose its coordinator."""
    assert await outcome_of(stream, case) == "unavailable"


async def outcomes_after_kill(worker: dict[str, Any], ending: list[asyncio.Task[str]]) -> str:
    """SIGKILL the worker of these streams; returns its old incarnation when all have ended, in time."""
    killed_at, ended_at = time.monotonic(), dict[str, float]()
    for task in ending:
        task.add_done_callback(lambda done: ended_at.update({done.get_name(): time.monotonic()}))
    old = await asyncio.to_thread(kill, worker)
    async with asyncio.timeout(40.0):
        outcomes = await asyncio.gather(*ending)
    assert set(outcomes) <= {"exact", "unavailable"}
    ended = [ended_at[t.get_name()] - killed_at for t, o in zip(ending, outcomes, strict=True) if o == "unavailable"]
    assert max(ended, default=0.0) < HEARD_WITHIN_S + BUSY_S
    return old


async def until_all(streams: list[AsyncStream], num_tokens: int, within_s: float = 20.0) -> None:
    ends_at = time.monotonic() + within_s
    while any(len(s.tokens) < num_tokens for s in streams):
        assert time.monotonic() < ends_at, f"tokens: {[len(s.tokens) for s in streams]}"
        await asyncio.sleep(0.01)  # a poll, bounded above


def kill(worker: dict[str, Any]) -> str:
    """SIGKILL; returns the incarnation that ended."""
    os.kill(worker["pid"], signal.SIGKILL)
    until(lambda: not is_alive(worker["pid"]), 2.0, f"{worker['id']} is dead")
    return str(worker["incarnation"])


def until_born_again(cluster: Cluster, worker_id: str, old: str) -> None:
    def is_new(workers: list[dict[str, object]]) -> bool:
        return any(w["id"] == worker_id and w["incarnation"] != old for w in workers) and len(workers) == 2

    cluster.until(f"{worker_id} is back as somebody new", is_new, within_s=40.0)


async def assert_works(cluster: Cluster) -> None:
    await assert_exact(cluster.target, case_of(100, 8), case_of(17, 8), case_of(1, 8))
    cluster.until_nothing_is_held()


async def test_decode_killed_while_it_streams(cluster: Cluster) -> None:
    decode = await asyncio.to_thread(cluster.worker, "decode-0")
    async with AsyncClient(cluster.target) as client:
        streams = [stream_of(client, case) for case in STREAMS]
        ending = [asyncio.create_task(outcome_of(s, c)) for s, c in zip(streams, STREAMS, strict=True)]
        await until_all(streams, 5)
        old = await outcomes_after_kill(decode, ending)
    until_born_again(cluster, "decode-0", old)
    await assert_works(cluster)


async def test_decode_killed_while_blocks_are_on_their_way(cluster: Cluster) -> None:
    pid, decode = cluster.pids()["prefill-0"], cluster.worker("decode-0")
    async with AsyncClient(cluster.target) as client:
        stream = stream_of(client, LONG)
        ending = asyncio.create_task(outcome_of(stream, LONG))
        await asyncio.to_thread(
            cluster.until, "a hand-off is open", lambda ws: any(w["transfers_in_flight"] for w in ws)
        )
        assert not stream.tokens
        old = await outcomes_after_kill(decode, [ending])
    until_born_again(cluster, "decode-0", old)
    assert cluster.pids()["prefill-0"] == pid
    await assert_works(cluster)


async def test_prefill_killed_in_the_middle_of_a_prompt(cluster: Cluster) -> None:
    """Decode gives back what it promised; a stream that prefill has nothing to do with goes on."""
    pid, prefill = cluster.pids()["decode-0"], cluster.worker("prefill-0")
    async with neighbour(cluster.target, case_of(40, 100, seed=9), times=1), AsyncClient(cluster.target) as client:
        stream = stream_of(client, LONGER)
        ending = asyncio.create_task(outcome_of(stream, LONGER))
        await asyncio.to_thread(cluster.until, "it is computed", lambda ws: any(w["queued_tokens"] > 100 for w in ws))
        assert not stream.tokens
        old = await outcomes_after_kill(prefill, [ending])
    until_born_again(cluster, "prefill-0", old)
    assert cluster.pids()["decode-0"] == pid
    await assert_works(cluster)


async def test_a_worker_that_stands_still_for_a_second_ends_nothing(cluster: Cluster) -> None:
    before = cluster.pids()
    async with AsyncClient(cluster.target) as client:
        for worker_id, pid in before.items():
            cases = [case_of(200, 20, seed=20), case_of(30, 60, seed=21)]
            streams = [stream_of(client, case) for case in cases]
            collecting = [asyncio.create_task(s.collect()) for s in streams]
            await until_all(streams[1:], 1)
            with standing_still(pid):
                await asyncio.sleep(1.0)  # the time is what is tested
            results = await asyncio.gather(*collecting)
            assert [r.token_ids for r in results] == [answer_of(case) for case in cases], worker_id
    assert cluster.pids() == before
    cluster.until_nothing_is_held()


async def test_a_killed_coordinator_ends_its_streams_and_comes_back_and_sigterm_ends_all(tmp_path: Path) -> None:
    cluster = start_cluster(tmp_path / "log", *FLAGS, "--transport", "grpc")
    try:
        workers = cluster.pids()
        (coordinator,) = set(children_of(cluster.process.pid)) - set(workers.values())
        async with AsyncClient(cluster.target) as client:
            streams = [stream_of(client, case) for case in STREAMS]
            failing = [asyncio.create_task(failure_of(s, c)) for s, c in zip(streams, STREAMS, strict=True)]
            await until_all(streams, 5)
            os.kill(coordinator, signal.SIGKILL)
            async with asyncio.timeout(HEARD_WITHIN_S):
                await asyncio.gather(*failing)
        await asyncio.to_thread(until, lambda: serves(cluster.target, 2), 30.0, "a new coordinator serves")
        assert cluster.pids() == workers
        await assert_works(cluster)
        everybody = children_of(cluster.process.pid)
        assert len(everybody) == 3
        async with neighbour(cluster.target, case_of(20, 50), times=1):  # SIGTERM lets it end
            assert await asyncio.to_thread(cluster.stop) == 0
        assert not [pid for pid in everybody if is_alive(pid)]
    finally:
        cluster.stop()


async def test_nothing_outlives_a_killed_up(tmp_path: Path) -> None:
    cluster = start_cluster(tmp_path / "log", *FLAGS, "--transport", "grpc")
    try:
        everybody = children_of(cluster.process.pid)
        assert len(everybody) == 3
        async with AsyncClient(cluster.target) as client:
            stream = stream_of(client, STREAMS[0])
            failing = asyncio.create_task(failure_of(stream, STREAMS[0]))
            await until_all([stream], 5)
            cluster.process.kill()
            cluster.process.wait(5)
            async with asyncio.timeout(HEARD_WITHIN_S):
                await failing
        until(lambda: not any(is_alive(pid) for pid in everybody), 5.0, "all processes are gone")
    finally:
        cluster.stop()


async def test_prefill_restarted_five_times_at_random_moments_leaves_decode_alone(tmp_path: Path) -> None:
    """Started by hand, so that each new incarnation comes at once, under the same name."""
    rng = random.Random(5)
    common = ("--executor", "hash", "--transport", "nixl", "--num-blocks", "96", "--step-tokens", "32")
    common = (*common, "--step-seconds", "0.01")
    with role_process(tmp_path, "coordinator", "--executor", "hash", "--listen", "127.0.0.1:0") as coordinator:
        target = coordinator.address
        with role_process(tmp_path, "decode", "--coordinator", target, "--worker-id", "d", *common) as decode:
            prefill = RoleProcess(tmp_path, "prefill", "--coordinator", target, "--worker-id", "p", *common)
            try:
                for _ in range(5):
                    await asyncio.to_thread(until, lambda: serves(target, 2), 20.0, "both are up")
                    pid = prefill.pid
                    outcomes = await asyncio.gather(
                        *(ask_while_killed(target, s) for s in range(8)), restart_soon(prefill, rng)
                    )
                    assert set(outcomes) <= {"exact", "not moved", "unavailable", None}
                    assert prefill.pid != pid
                await asyncio.to_thread(until, lambda: serves(target, 2), 20.0, "both are up")
                await assert_exact(target, *(case_of(length, 8) for length in (1, 16, 17, 100)))
                with Client(target) as client:
                    assert [w["pid"] for w in client.topology()["workers"] if w["id"] == "d"] == [decode.pid]
                await asyncio.to_thread(until, lambda: holds_nothing(target), 8.0, "all blocks are back")
            finally:
                prefill.kill()


async def ask_while_killed(target: str, seed: int) -> str:
    """A stream of its own client; right as far as it goes."""
    case = case_of(150, 25, seed)
    async with AsyncClient(target) as client:
        return await outcome_of(stream_of(client, case), case)


async def restart_soon(process: RoleProcess, rng: random.Random) -> None:
    await asyncio.sleep(rng.uniform(0.0, 0.3))
    process.kill()
    await asyncio.to_thread(process.start)


def serves(target: str, num_workers: int) -> bool:
    try:
        with Client(target, timeout=2.0) as client:
            return len(client.topology()["workers"]) == num_workers
    except KVRelayError:
        return False


def holds_nothing(target: str) -> bool:
    with Client(target) as client:
        workers = client.topology()["workers"]
    return all(
        w["blocks"]["free"] + w["blocks"]["cached"] == w["blocks"]["total"] and not w["transfers_in_flight"]
        for w in workers
    )


def children_of(pid: int) -> list[int]:
    """Process ids of the living children."""
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [child for child in map(int, text.split()) if is_alive(child)]


async def test_blocks_of_a_writer_that_hangs_come_back_with_its_death_and_not_before(cluster: Cluster) -> None:
    """Prefill stands still with a hand-off open, the client leaves: what could still be written to is no one else's."""
    async with AsyncClient(cluster.target) as client:
        stream = stream_of(client, LONG)
        reading = asyncio.create_task(stream.collect())
        await asyncio.to_thread(cluster.until, "the hand-off is open", is_receiving)
        prefill = cluster.worker("prefill-0")
        with standing_still(prefill["pid"]):
            stream.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            if prefill["transport"] == "nixl":  # with grpc decode itself refuses what comes late
                await asyncio.to_thread(cluster.until, "they are quarantined", lambda _: num_quarantined(cluster) == 63)
            await asyncio.to_thread(kill, prefill)
    until_born_again(cluster, "prefill-0", prefill["incarnation"])
    await assert_works(cluster)


def is_receiving(workers: list[dict[str, Any]]) -> bool:
    return any(w["role"] == "decode" and w["transfers_in_flight"] for w in workers)


def num_quarantined(cluster: Cluster) -> int:
    return int(cluster.worker("decode-0")["blocks"]["quarantined"])
