"""Workers that are told to go, one by one or in turn: no request fails, every answer is exact, and they exit 0."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.cluster import Cluster, running_cluster, until
from support.golden import Case
from support.processes import RoleProcess, role_process
from support.streams import Neighbour, answer_of, case_of, neighbour, stream_of

from coordinator.admission import NO_WORKER_GRACE_S
from kvrelay.client import AsyncClient, AsyncStream, Client
from kvrelay.errors import Unavailable

pytestmark = pytest.mark.e2e

FLAGS = ("--executor", "hash", "--num-blocks", "512", "--step-tokens", "32", "--step-seconds", "0.02")
EXIT_MARGIN_S = 4.0
"""A process is seen to have ended so long after its grace at most, on a machine that is busy with tests."""


class Pools:
    """A coordinator and workers started by hand: p0, p1, ... and d0, d1, ... slow: flags of the prefill workers."""

    def __init__(
        self,
        directory: Path,
        stack: AsyncExitStack,
        transport: str,
        prefill: int,
        decode: int,
        slow: tuple[str, ...] = (),
    ) -> None:
        enter = stack.enter_context
        coordinator = enter(role_process(directory, "coordinator", "--executor", "hash", "--listen", "127.0.0.1:0"))
        self.target = coordinator.address
        common = ("--coordinator", self.target, "--transport", transport, "--drain-grace-s", "4", *FLAGS)
        names = [f"p{i}" for i in range(prefill)] + [f"d{i}" for i in range(decode)]
        self.workers: dict[str, RoleProcess] = {}
        for name in names:
            role = "prefill" if name.startswith("p") else "decode"
            own = slow if role == "prefill" else ()
            self.workers[name] = enter(role_process(directory, role, "--worker-id", name, *common, *own))
        until(lambda: len(self.listing()) == len(names), 20.0, "all workers are up")

    def listing(self) -> list[dict[str, Any]]:
        with Client(self.target) as client:
            return [dict(w) for w in client.topology()["workers"]]

    def worker(self, name: str) -> dict[str, Any]:
        return next(w for w in self.listing() if w["id"] == name)


@asynccontextmanager
async def pools(
    directory: Path, transport: str, prefill: int, decode: int, slow: tuple[str, ...] = ()
) -> AsyncIterator[Pools]:
    async with AsyncExitStack() as stack:
        yield await asyncio.to_thread(Pools, directory, stack, transport, prefill, decode, slow)


@asynccontextmanager
async def asked(target: str, cases: list[Case]) -> AsyncIterator[list[AsyncStream]]:
    """All cases at once; afterwards each must have its exact answer."""
    async with AsyncClient(target) as client:
        streams = [stream_of(client, case) for case in cases]
        collecting = [asyncio.create_task(stream.collect()) for stream in streams]
        try:
            yield streams
            results = await asyncio.gather(*collecting)
        finally:
            for task in collecting:
                task.cancel()
            await asyncio.gather(*collecting, return_exceptions=True)
    assert [r.token_ids for r in results] == [answer_of(case) for case in cases]
    for stream, case in zip(streams, cases, strict=True):
        assert [t.index for t in stream.tokens] == list(range(case.max_tokens))


async def until_true(condition: Any, what: str) -> None:
    await asyncio.to_thread(until, condition, 20.0, what)


@pytest.mark.parametrize("transport", ["nixl", "grpc"])
async def test_a_prefill_worker_told_to_go_with_20_hand_offs_under_way_loses_none(
    tmp_path: Path, transport: str
) -> None:
    """20 of 40: the other prefill worker has the other half. Each step of theirs takes a while, so they last."""
    cases = [case_of(60 + i, 10, seed=i) for i in range(40)]
    slow = ("--step-tokens", "2048", "--step-seconds", "0.5")
    async with pools(tmp_path, transport, prefill=2, decode=1, slow=slow) as cluster:
        async with asked(cluster.target, cases):
            await until_true(lambda: cluster.worker("p0")["transfers_in_flight"] >= 12, "hand-offs are under way")
            began = time.monotonic()
            assert await asyncio.to_thread(cluster.workers["p0"].terminate) == 0
            assert time.monotonic() - began < 4.0 + EXIT_MARGIN_S
        await until_true(lambda: all(holds_nothing(w) for w in cluster.listing()), "all blocks are back")
        assert [w["id"] for w in cluster.listing()] == ["d0", "p1"]


@pytest.mark.parametrize("transport", ["nixl", "grpc"])
async def test_a_decode_worker_told_to_go_with_20_streams_ends_or_moves_all(tmp_path: Path, transport: str) -> None:
    """Half of them are short enough to end within the grace of 4 s."""
    cases = [case_of(40 + i, 40 if i % 2 else 400, seed=i) for i in range(20)]
    async with pools(tmp_path, transport, prefill=1, decode=2) as cluster:
        async with asked(cluster.target, cases) as streams:
            await until_true(lambda: all(len(s.tokens) > 3 for s in streams), "all streams have begun")
            began = time.monotonic()
            assert await asyncio.to_thread(cluster.workers["d0"].terminate) == 0
            assert time.monotonic() - began < 4.0 + EXIT_MARGIN_S
        await until_true(lambda: all(holds_nothing(w) for w in cluster.listing()), "all blocks are back")
        assert [w["id"] for w in cluster.listing()] == ["d1", "p0"]


async def test_a_second_sigterm_ends_the_wait(tmp_path: Path) -> None:
    cases = [case_of(40, 300, seed=i) for i in range(4)]
    async with pools(tmp_path, "grpc", 1, 2) as cluster, asked(cluster.target, cases) as streams:
        await until_true(lambda: all(len(s.tokens) > 3 for s in streams), "all streams have begun")
        began = time.monotonic()
        with pytest.raises(subprocess.TimeoutExpired):
            await asyncio.to_thread(cluster.workers["d0"].terminate, 0.3)
        assert await asyncio.to_thread(cluster.workers["d0"].terminate) == 0
        assert time.monotonic() - began < 3.0


# kvrelay drain


def drain(target: str, worker: str, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvrelay.cli.main", "drain", worker, "--target", target, *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@asynccontextmanager
async def steady_load(target: str, num: int, max_tokens: int) -> AsyncIterator[list[Neighbour]]:
    """So many clients, each asking on and on; each answer must be exact, or the test fails."""
    async with AsyncExitStack() as stack:
        cases = [case_of(20 + 37 * i, max_tokens + i, seed=i) for i in range(num)]
        yield [await stack.enter_async_context(neighbour(target, case)) for case in cases]


async def drain_in_turn(cluster: Cluster, load: list[Neighbour], gaps_s: list[float]) -> None:
    """Each worker of the cluster; during each drain requests are answered. gaps_s: how long each was not there."""
    before = {w["id"]: w["incarnation"] for w in cluster.topology()}
    for worker, incarnation in before.items():
        answered = sum(n.answered for n in load)
        done = await asyncio.to_thread(drain, cluster.target, worker, "--grace-s", "10", "--json")
        assert done.returncode == 0, done.stderr
        told = json.loads(done.stdout)
        assert (told["worker"], told["incarnation"]) == (worker, incarnation)
        assert told["back"] not in (None, incarnation)
        gaps_s.append(told["back_s"] - told["gone_s"])
        await until_true(lambda so_far=answered: sum(n.answered for n in load) > so_far, "requests are answered")
    after = {w["id"]: w["incarnation"] for w in cluster.topology()}
    assert after.keys() == before.keys()
    assert not set(after.values()) & set(before.values())


async def test_draining_every_worker_of_2_and_2_in_turn_under_load_fails_no_request(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with running_cluster(log, *FLAGS, "--prefill", "2", "--decode", "2", "--transport", "nixl") as cluster:
        async with steady_load(cluster.target, 6, max_tokens=30) as load:
            await drain_in_turn(cluster, load, [])
        cluster.until_nothing_is_held()
        assert cluster.stop() == 0


async def test_draining_the_only_workers_in_turn_under_a_short_load_fails_no_request(tmp_path: Path) -> None:
    """Provided that a worker is started within the time for which the coordinator waits for one."""
    gaps_s: list[float] = []
    with running_cluster(tmp_path / "log", *FLAGS, "--transport", "nixl") as cluster:
        try:
            async with steady_load(cluster.target, 2, max_tokens=8) as load:
                await drain_in_turn(cluster, load, gaps_s)
        except (AssertionError, Unavailable):
            if max(gaps_s, default=0.0) > NO_WORKER_GRACE_S - 0.5:
                pytest.skip(f"this machine is too busy: a worker needed {max(gaps_s):.1f} s to start")
            raise
        cluster.until_nothing_is_held()


async def test_drain_says_what_is_left_and_names_the_workers_there_are_for_one_that_is_not(tmp_path: Path) -> None:
    with running_cluster(tmp_path / "log", *FLAGS, "--transport", "grpc", "--decode", "2") as cluster:
        async with asked(cluster.target, [case_of(40, 400, seed=i) for i in range(4)]) as streams:
            await until_true(lambda: all(len(s.tokens) > 3 for s in streams), "all streams have begun")
            done = await asyncio.to_thread(drain, cluster.target, "decode-0", "--grace-s", "20")
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        assert lines[0].startswith("decode-0 (incarnation ")
        assert lines[0].endswith("drains: 20 s at most; 2 sequences and 0 transfers left")
        assert any("decode-0 has gone after" in line for line in lines)
        assert lines[-1].startswith("decode-0 is back as incarnation ")
        unknown = await asyncio.to_thread(drain, cluster.target, "decode-7")
        assert unknown.returncode == 1
        assert "no worker 'decode-7'; there are: decode-0, decode-1, prefill-0" in unknown.stderr
        wrong = await asyncio.to_thread(drain, cluster.target, "decode-0", "--grace-s", "-1")
        assert wrong.returncode == 2


# ids and ports


def decode_once(target: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """A decode worker that is expected to end by itself."""
    command = [sys.executable, "-m", "kvrelay.cli.main", "decode", "--coordinator", target, *FLAGS, *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=40, check=False)


async def test_an_id_in_use_is_refused_to_a_second_process_and_the_first_goes_on(tmp_path: Path) -> None:
    async with pools(tmp_path, "grpc", prefill=1, decode=1) as cluster:
        async with asked(cluster.target, [case_of(40, 200)]):
            flags = ("--worker-id", "d0", "--transport", "grpc")
            second = await asyncio.to_thread(decode_once, cluster.target, *flags)
        assert second.returncode == 78
        assert "worker d0: id is in use by a live worker at " in second.stderr
        assert cluster.worker("d0")["pid"] == cluster.workers["d0"].pid


async def test_a_worker_whose_port_is_taken_exits_1(tmp_path: Path) -> None:
    async with pools(tmp_path, "grpc", prefill=1, decode=1) as cluster:
        taken = cluster.workers["d0"].address
        second = await asyncio.to_thread(decode_once, cluster.target, "--listen", taken)
    assert second.returncode == 1
    assert f"cannot listen on {taken}" in second.stderr


def holds_nothing(worker: dict[str, Any]) -> bool:
    blocks = worker["blocks"]
    return bool(blocks["free"] + blocks["cached"] == blocks["total"] and not worker["transfers_in_flight"])
