"""A stream outlives the workers that serve it: killed after any number of tokens, the client notices nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.cluster import Cluster, is_alive, running_cluster, until
from support.golden import B, Case
from support.streams import answer_of, prompt_of

from kvrelay.client import AsyncClient, AsyncStream, GenerateResult
from kvrelay.errors import Unavailable

pytestmark = pytest.mark.e2e

FLAGS = ("--executor", "hash", "--transport", "grpc", "--num-blocks", "96", "--step-tokens", "32")
SLOW = ("--step-seconds", "0.03")
LONG = 1000
"""Tokens of a prompt that takes 32 steps: at least 0.6 s."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    log = tmp_path_factory.mktemp("migration") / "log"
    with running_cluster(log, *FLAGS, *SLOW, "--prefill", "2", "--decode", "2") as cluster:
        yield cluster


def start(client: AsyncClient, case: Case, stop: Sequence[str] = ()) -> AsyncStream:
    sampling = case.sampling
    return client.generate(
        list(case.prompt),
        max_tokens=case.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        seed=sampling.seed,
        stop=stop,
        ignore_eos=True,
        deadline_s=60.0,
    )


@asynccontextmanager
async def reading(
    target: str, cases: Sequence[Case], stop: Sequence[str] = ()
) -> AsyncIterator[list[tuple[AsyncStream, asyncio.Task[GenerateResult]]]]:
    """All cases, placed in this order, each stream with the task that reads it; read to the end after the body."""
    async with AsyncClient(target) as client:
        streams, tasks = [start(client, case, stop) for case in cases], list[asyncio.Task[GenerateResult]]()
        try:
            for stream in streams:
                tasks.append(asyncio.create_task(stream.collect()))
                await until_true(lambda stream=stream: bool(stream.request_id))
            yield list(zip(streams, tasks, strict=True))
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def until_tokens(streams: Sequence[AsyncStream], num_tokens: int) -> None:
    """Until each stream has shown its client so many tokens."""
    await until_true(lambda: all(len(s.tokens) >= num_tokens for s in streams))


async def until_true(condition: Callable[[], bool]) -> None:
    ends_at = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < ends_at, "it did not come true within 20 s"
        await asyncio.sleep(0.002)  # a poll, bounded above


def kill_busy(cluster: Cluster, role: str) -> dict[str, Any]:
    """SIGKILL the first worker of the role that has something to do, as soon as there is one; what it was."""
    found: list[dict[str, Any]] = []

    def busy(workers: list[dict[str, Any]]) -> bool:
        found[:] = [w for w in workers if w["role"] == role and (w["transfers_in_flight"] or w["running"])]
        return bool(found)

    cluster.until(f"a {role} worker is busy", busy)
    os.kill(found[0]["pid"], signal.SIGKILL)
    until(lambda: not is_alive(found[0]["pid"]), 2.0, f"{found[0]['id']} is dead")
    return found[0]


def until_whole(cluster: Cluster, killed: dict[str, Any], num_workers: int = 4) -> None:
    def back(workers: list[dict[str, Any]]) -> bool:
        lives = {w["id"]: w["incarnation"] for w in workers}
        return len(lives) == num_workers and lives[killed["id"]] != killed["incarnation"]

    cluster.until(f"{killed['id']} is back as somebody new", back, within_s=40.0)
    cluster.until_nothing_is_held()


def assert_as_if_nothing_happened(result: GenerateResult, case: Case) -> None:
    """The tokens of one process; the client has checked that each index came once and in order."""
    assert result.token_ids == answer_of(case)
    assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (len(case.prompt), case.max_tokens)
    assert (result.finish_reason, len(result.token_ids)) == ("length", case.max_tokens)


@pytest.mark.parametrize("k", [1, B - 1, B, B + 1, 100])
async def test_decode_killed_after_k_tokens(cluster: Cluster, k: int) -> None:
    """Two greedy and two seeded streams over two decode workers: one of each loses its worker."""
    cases = [Case(prompt_of(40 + k, seed=i), k + 80, None if i < 2 else 7 + i) for i in range(4)]
    async with reading(cluster.target, cases) as running:
        await until_tokens([stream for stream, _ in running], k)
        killed = await asyncio.to_thread(kill_busy, cluster, "decode")
    results = [task.result() for _, task in running]
    for result, case in zip(results, cases, strict=True):
        assert_as_if_nothing_happened(result, case)
    moved = [case.seed is None for result, case in zip(results, cases, strict=True) if result.migrations == 1]
    assert sorted(moved) == [False, True], "the killed worker served one greedy and one seeded stream"
    assert all(r.decode_worker != killed["id"] for r in results if r.migrations)
    await asyncio.to_thread(until_whole, cluster, killed)


@pytest.mark.parametrize("role", ["decode", "prefill"])
async def test_a_worker_killed_before_the_first_token(cluster: Cluster, role: str) -> None:
    case = Case(prompt_of(LONG, seed=len(role)), 40, 5)
    async with reading(cluster.target, [case]) as ((stream, task),):
        killed = await asyncio.to_thread(kill_busy, cluster, role)
        assert not stream.tokens
    assert_as_if_nothing_happened(task.result(), case)
    assert task.result().migrations == 1
    await asyncio.to_thread(until_whole, cluster, killed)


async def test_a_stop_string_over_the_cut_still_ends_the_stream(cluster: Cluster) -> None:
    case = Case(prompt_of(30, seed=3), 200, None)
    text = bytes(t for t in answer_of(case) if t < 256).decode("utf-8", "replace")
    stop = text[20:80]
    async with reading(cluster.target, [case], [stop]) as ((_, undisturbed),):
        pass
    async with reading(cluster.target, [case], [stop]) as ((stream, task),):
        await until_tokens([stream], 45)
        killed = await asyncio.to_thread(kill_busy, cluster, "decode")
    result, expected = task.result(), undisturbed.result()
    assert (result.migrations, expected.migrations) == (1, 0)
    assert (result.text, result.finish_reason) == (text[:20], "stop")
    assert (result.token_ids, result.text) == (expected.token_ids, expected.text)
    assert result.usage.completion_tokens == expected.usage.completion_tokens
    assert result.token_ids == answer_of(case)[: len(result.token_ids)]
    await asyncio.to_thread(until_whole, cluster, killed)


async def test_the_only_decode_worker_restarted_within_the_grace_saves_old_streams_and_new(tmp_path: Path) -> None:
    with running_cluster(tmp_path / "log", *FLAGS, *SLOW) as cluster:
        for _ in range(3):  # a busy machine may need longer than the grace for a start
            if await is_saved_by_a_restart(cluster):
                return
    pytest.fail("no restart saved the streams")


async def is_saved_by_a_restart(cluster: Cluster) -> bool:
    cases = [Case(prompt_of(40, seed=s), 60, None) for s in range(4)]
    late = Case(prompt_of(20), 5, None)
    try:
        async with reading(cluster.target, cases) as running:
            await until_tokens([stream for stream, _ in running], 5)
            killed = await asyncio.to_thread(kill_busy, cluster, "decode")
            async with reading(cluster.target, [late]) as ((_, asked),):
                pass
    except Unavailable:
        await asyncio.to_thread(until_whole, cluster, killed, 2)
        return False
    for (_, task), case in zip(running, cases, strict=True):
        assert_as_if_nothing_happened(task.result(), case)
        assert task.result().migrations >= 1
    assert_as_if_nothing_happened(asked.result(), late)
    await asyncio.to_thread(until_whole, cluster, killed, 2)
    return True
