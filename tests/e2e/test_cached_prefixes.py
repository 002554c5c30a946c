"""Cached prefixes over real processes: they save work, are told to the client, and never change an answer."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cluster import Cluster, running_cluster
from support.golden import B, Case, ask_alone, ask_together
from support.streams import answer_of, case_of, prompt_of

from kvrelay.client import AsyncClient, GenerateResult

pytestmark = pytest.mark.e2e

FLAGS = ("--executor", "hash", "--num-blocks", "512")


@pytest.fixture(scope="module", params=["nixl", "grpc"])
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    log = tmp_path_factory.mktemp("cached_prefixes") / "log"
    with running_cluster(log, *FLAGS, "--transport", request.param) as cluster:
        yield cluster


def cached_blocks(cluster: Cluster) -> int:
    """Blocks that are cached anywhere."""
    return sum(w["blocks"]["cached"] for w in cluster.topology())


def assert_exact(results: list[GenerateResult], cases: list[Case]) -> None:
    assert [r.token_ids for r in results] == [answer_of(case) for case in cases]


async def test_one_prompt_sent_8_times_alone_and_between_22_others_gets_8_equal_answers(cluster: Cluster) -> None:
    case = case_of(6 * B + 5, 20, seed=58)
    alone = await ask_alone(cluster.target, [case] * 4)
    mixed = [case_of(5 + 9 * i, 10 + i, seed=100 + i) for i in range(22)] + [case] * 4
    random.Random(58).shuffle(mixed)
    together = await ask_together(cluster.target, mixed)
    assert_exact([*alone, *together], [case] * 4 + mixed)
    assert [r.usage.cached_tokens for r in alone] == [0, 6 * B, 6 * B, 6 * B]
    assert [r.usage.cached_tokens for r, c in zip(together, mixed, strict=True) if c is case] == [6 * B] * 4
    cluster.until_nothing_is_held()


@pytest.mark.parametrize("k", [1, 2, 5])
async def test_a_prompt_of_whole_blocks_is_cached_but_for_its_last_token(cluster: Cluster, k: int) -> None:
    prompt = prompt_of(k * B, seed=61)
    cases = [Case(prompt, 5, None), Case(prompt, 5, None), Case((*prompt, 7), 5, None)]
    results = await ask_alone(cluster.target, cases)
    assert_exact(results, cases)
    assert [r.usage.cached_tokens for r in results] == [0, k * B - 1, k * B]


async def test_a_second_turn_finds_the_first_and_its_answer(cluster: Cluster) -> None:
    """Prefill caches the 3 full blocks of the first prompt, decode 5 of the conversation: what is computed is told."""
    (first,) = await ask_alone(cluster.target, [case_of(50, 40, seed=13)])
    second = Case((*prompt_of(50, 13), *first.token_ids, 1, 2, 3), 10, None)
    (result,) = await ask_alone(cluster.target, [second])
    assert_exact([result], [second])
    assert result.usage.cached_tokens == 3 * B
    cluster.until_nothing_is_held()


async def test_a_request_may_decline_and_salts_are_apart(cluster: Cluster) -> None:
    prompt = list(prompt_of(80, seed=64))
    async with AsyncClient(cluster.target) as client:

        async def cached(**more: object) -> int:
            result = await client.generate(prompt, max_tokens=3, temperature=0.0, ignore_eos=True, **more).collect()
            assert result.token_ids == answer_of(Case(tuple(prompt), 3, None))
            return result.usage.cached_tokens

        assert [await cached(), await cached(prefix_cache=False), await cached(cache_salt="s")] == [0, 0, 0]
        assert [await cached(), await cached(cache_salt="s"), await cached(cache_salt="t")] == [79, 79, 0]


async def test_workers_told_to_cache_nothing_cache_nothing(tmp_path: Path) -> None:
    case = case_of(6 * B + 5, 20, seed=58)
    with running_cluster(tmp_path / "log", *FLAGS, "--transport", "grpc", "--no-prefix-cache") as cluster:
        results = await ask_alone(cluster.target, [case] * 2)
        assert_exact(results, [case] * 2)
        assert [r.usage.cached_tokens for r in results] == [0, 0]
        cluster.until_nothing_is_held()
        assert cached_blocks(cluster) == 0


async def test_without_prefill_workers_decode_serves_alone_and_caches(tmp_path: Path) -> None:
    case, others = case_of(6 * B + 5, 20, seed=58), [case_of(3 + 40 * i, 15, seed=i) for i in range(6)]
    with running_cluster(tmp_path / "log", *FLAGS, "--transport", "grpc", "--prefill", "0") as cluster:
        results = [*await ask_alone(cluster.target, [case] * 2), *await ask_together(cluster.target, others)]
        assert_exact(results, [case, case, *others])
        assert [r.usage.cached_tokens for r in results[:2]] == [0, 6 * B]
        assert {w["role"] for w in cluster.topology()} == {"decode"}
        cluster.until_nothing_is_held()


async def test_short_prompts_are_computed_by_decode_if_told_so(tmp_path: Path) -> None:
    short, long = case_of(40, 10, seed=1), case_of(200, 10, seed=2)
    flags = (*FLAGS, "--transport", "grpc", "--local-prefill-below", "64")
    with running_cluster(tmp_path / "log", *flags) as cluster:
        results = await ask_together(cluster.target, [short, long])
        assert_exact(results, [short, long])
        assert [bool(r.prefill_worker) for r in results] == [False, True]
        counters = cluster.worker("decode-0")["counters"]
        assert counters["local_prefills"] == 1


@pytest.mark.parametrize("mode", ["swap", "recompute", "auto"])
async def test_sequences_that_make_room_for_each_other_are_exact(tmp_path: Path, mode: str) -> None:
    """Six that grow to 35 blocks each, in a pool of 64."""
    cases = [case_of(60, 500, seed=s) for s in range(6)]
    flags = ("--executor", "hash", "--transport", "grpc", "--num-blocks", "64", "--preempt", mode, "--swap-mb", "4")
    with running_cluster(tmp_path / "log", *flags) as cluster:
        assert_exact(await ask_together(cluster.target, cases), cases)
        cluster.until_nothing_is_held()
        counters = cluster.worker("decode-0")["counters"]
    told = {way: counters.get(f"preempted_{way}", 0) for way in ("swap", "recompute")}
    assert counters.get("preempted", 0) > 0, "nothing had to make room"
    assert sum(told.values()) == counters["preempted"]
    if mode != "auto":
        assert told[mode] == counters["preempted"]
