"""Workers that come and go while the coordinator serves: started by hand, found by announcing themselves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.cluster import until
from support.processes import RoleProcess, role_process
from support.streams import answer_of, assert_exact, case_of, neighbour, stream_of

from kvrelay.client import AsyncClient, Client
from kvrelay.errors import Unavailable

pytestmark = pytest.mark.e2e

AT_ONCE_S = 1.0
"""A role that never had a worker is not waited for."""
COMMON = ("--executor", "hash", "--transport", "grpc", "--num-blocks", "64")


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[RoleProcess]:
    with role_process(tmp_path, "coordinator", "--executor", "hash", "--listen", "127.0.0.1:0") as process:
        yield process


def workers_of(target: str) -> dict[str, dict[str, Any]]:
    with Client(target) as client:
        return {w["id"]: dict(w) for w in client.topology()["workers"]}


def until_workers(target: str, names: set[str], within_s: float = 10.0) -> None:
    until(lambda: set(workers_of(target)) == names, within_s, f"the workers are {names}")


async def assert_refused(target: str, missing: str, within_s: float) -> None:
    async with AsyncClient(target) as client:
        began = time.monotonic()
        with pytest.raises(Unavailable) as raised:
            await client.generate([1, 2, 3], max_tokens=4).collect()
        assert time.monotonic() - began < within_s
    assert missing in raised.value.message
    assert raised.value.retry_after_s


async def decode_workers_used(target: str, cases: int = 8) -> set[str]:
    """Which decode workers answered that many requests at once."""
    asked = [case_of(20, 8, seed=s) for s in range(cases)]
    async with AsyncClient(target) as client:
        results = await asyncio.gather(*(stream_of(client, case).collect() for case in asked))
    assert [r.token_ids for r in results] == [answer_of(case) for case in asked]
    return {r.decode_worker for r in results}


async def one_more_comes_and_goes(target: str, second: RoleProcess) -> None:
    """d1 joins p and d0, is used, and leaves when it is told to, once the stream that runs there has ended.

    One stream runs on each: the neighbour's and this one.
    """
    case = case_of(20, 150, seed=77)
    try:
        await asyncio.to_thread(until_workers, target, {"p", "d0", "d1"})
        assert await decode_workers_used(target) == {"d0", "d1"}
        async with AsyncClient(target) as client:
            stream = stream_of(client, case)
            running = asyncio.create_task(stream.collect())
            await asyncio.to_thread(until, lambda: len(stream.tokens) > 2, 5.0, "the stream runs")
            assert await asyncio.to_thread(second.terminate) == 0
            assert (await running).token_ids == answer_of(case)
        await asyncio.to_thread(until_workers, target, {"p", "d0"})
        assert await decode_workers_used(target) == {"d0"}
    finally:
        second.kill()


async def test_workers_come_and_go(coordinator: RoleProcess, tmp_path: Path) -> None:
    target = coordinator.address
    flags = ("--coordinator", target, *COMMON)
    await assert_refused(target, "no worker", AT_ONCE_S)
    with role_process(tmp_path, "prefill", *flags, "--worker-id", "p") as prefill:
        await asyncio.to_thread(until_workers, target, {"p"})
        await assert_refused(target, "decode", AT_ONCE_S)
        slow = (*flags, "--step-seconds", "0.01")
        with role_process(tmp_path, "decode", *slow, "--worker-id", "d0"):
            await asyncio.to_thread(until_workers, target, {"p", "d0"})
            async with neighbour(target, case_of(30, 150)):
                await one_more_comes_and_goes(target, RoleProcess(tmp_path, "decode", *slow, "--worker-id", "d1"))
            assert await asyncio.to_thread(prefill.terminate) == 0
            await asyncio.to_thread(until_workers, target, {"d0"})
            await assert_exact(target, case_of(100, 8), case_of(33, 20))  # decode computes prompts itself
            prefill.start()
            await asyncio.to_thread(until_workers, target, {"p", "d0"})
            await assert_exact(target, case_of(100, 8))
    assert await asyncio.to_thread(coordinator.terminate) == 0
