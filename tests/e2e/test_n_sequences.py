"""Several answers to one prompt over real processes: exactly those of one process, and of as many single requests."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.cluster import Cluster, running_cluster
from support.golden import B, Case
from support.streams import answer_of, prompt_of

from kvrelay.client import AsyncClient, AsyncStream, GenerateResult
from kvrelay.errors import InvalidArgument
from kvrelay.requests import Sampling

pytestmark = pytest.mark.e2e

N, SEED = 4, 77
FLAGS = ("--executor", "hash", "--transport", "grpc", "--num-blocks", "160")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    log = tmp_path_factory.mktemp("n_sequences") / "log"
    slow = ("--step-seconds", "0.01")
    with running_cluster(log, *FLAGS, *slow, "--prefill", "1", "--decode", "2") as cluster:
        yield cluster


def singles(prompt: tuple[int, ...], max_tokens: int) -> list[Case]:
    """What each of the sequences is as a request of its own."""
    seeds = [Sampling(seed=SEED).of_sequence(s).seed for s in range(N)]
    return [Case(prompt, max_tokens, seed) for seed in seeds]


def begin(client: AsyncClient, prompt: tuple[int, ...], max_tokens: int, stop: tuple[str, ...] = ()) -> AsyncStream:
    """Like a seeded case, but for n."""
    return client.generate(
        list(prompt), max_tokens=max_tokens, top_p=0.95, seed=SEED, n=N, ignore_eos=True, stop=stop, deadline_s=60.0
    )


async def ask(target: str, prompt: tuple[int, ...], max_tokens: int, stop: tuple[str, ...] = ()) -> GenerateResult:
    async with AsyncClient(target) as client:
        return await begin(client, prompt, max_tokens, stop).collect()


def ask_local(tmp_path: Path, prompt: tuple[int, ...], max_tokens: int, *more: str) -> list[dict[str, object]]:
    """The choices of `generate --local`."""
    (tmp_path / "ids").write_text(json.dumps(prompt))
    about = ("--tokens", str(tmp_path / "ids"), "--max-tokens", str(max_tokens), "--ignore-eos")
    sampling = ("--top-p", "0.95", "--seed", str(SEED), "-n", str(N))
    command = [sys.executable, "-m", "kvrelay.cli.main", "generate", "--local", "--executor", "hash", "--json"]
    done = subprocess.run([*command, *about, *sampling, *more], capture_output=True, check=True, timeout=60)
    choices: list[dict[str, object]] = json.loads(done.stdout)["choices"]
    return choices


@pytest.mark.parametrize("length", [1, B - 1, B, B + 1, 1000])
async def test_the_answers_are_those_of_one_process_and_of_single_requests(
    cluster: Cluster, tmp_path: Path, length: int
) -> None:
    prompt = prompt_of(length, seed=length)
    result = await ask(cluster.target, prompt, 24)
    ids = [choice.token_ids for choice in result.choices]
    assert ids == [answer_of(case) for case in singles(prompt, 24)]
    assert len(set(ids)) == N
    local = ask_local(tmp_path, prompt, 24)
    assert [list(choice.token_ids) for choice in result.choices] == [choice["token_ids"] for choice in local]
    assert [choice.text for choice in result.choices] == [choice["text"] for choice in local]
    for choice in result.choices:
        assert (choice.usage.prompt_tokens, choice.usage.completion_tokens) == (length, 24)
        assert choice.hand_off is not None
        moved = choice.hand_off.num_blocks + choice.hand_off.num_cached_blocks
        assert moved == -(-length // B), "the prompt moves once, for all of them"
    cluster.until_nothing_is_held()


async def test_stop_strings_end_each_sequence_by_its_own_text(cluster: Cluster, tmp_path: Path) -> None:
    prompt = prompt_of(40, seed=3)
    whole = await ask(cluster.target, prompt, 40)
    stops = tuple(choice.text[at] for choice, at in zip(whole.choices, (0, 9, 20), strict=False))
    result = await ask(cluster.target, prompt, 40, stops)
    local = ask_local(tmp_path, prompt, 40, *(flag for stop in stops for flag in ("--stop", stop)))
    got = [(choice.text, choice.finish_reason, list(choice.token_ids)) for choice in result.choices]
    assert got == [(choice["text"], choice["finish_reason"], choice["token_ids"]) for choice in local]
    assert result.choices[0].text == ""
    assert {choice.usage.completion_tokens for choice in result.choices} > {1}
    cluster.until_nothing_is_held()


async def test_one_token_each(cluster: Cluster) -> None:
    prompt = prompt_of(33, seed=5)
    result = await ask(cluster.target, prompt, 1)
    assert [choice.token_ids for choice in result.choices] == [answer_of(case) for case in singles(prompt, 1)]
    assert [choice.decode_worker for choice in result.choices] == [""] * N
    cluster.until_nothing_is_held()


async def test_a_prompt_that_is_asked_again_says_what_was_cached(cluster: Cluster) -> None:
    prompt = prompt_of(200, seed=21)
    seen = []
    async with AsyncClient(cluster.target) as client:
        for prefix_cache in (True, True, False):
            stream = client.generate(list(prompt), max_tokens=4, n=N, ignore_eos=True, prefix_cache=prefix_cache)
            choices = (await stream.collect()).choices
            moved = [(c.hand_off.num_blocks, c.hand_off.num_cached_blocks) for c in choices if c.hand_off is not None]
            seen.append(({c.usage.cached_tokens for c in choices}, moved))
    full, all_blocks = 200 // B, -(-200 // B)
    assert seen == [
        ({0}, [(all_blocks, 0)] * N),
        ({full * B}, [(all_blocks - full, full)] * N),
        ({0}, [(all_blocks, 0)] * N),
    ]


@pytest.mark.parametrize("shown", [1, 20])
async def test_decode_dies_in_the_middle_and_all_sequences_go_on(cluster: Cluster, shown: int) -> None:
    prompt = prompt_of(100, seed=7 + shown)
    cluster.until("all are there", lambda workers: len(workers) == 3, within_s=40.0)
    async with AsyncClient(cluster.target) as client:
        stream = begin(client, prompt, 60)
        async for _ in stream:
            if len(stream.tokens) == N * shown:
                await asyncio.to_thread(_kill_busy_decode, cluster)
        result = stream.result
    assert [choice.token_ids for choice in result.choices] == [answer_of(case) for case in singles(prompt, 60)]
    assert [choice.migrations for choice in result.choices] == [1] * N
    cluster.until("all are there again", lambda workers: len(workers) == 3, within_s=40.0)
    cluster.until_nothing_is_held()


def _kill_busy_decode(cluster: Cluster) -> None:
    busy: list[int] = []

    def found(workers: list[dict[str, Any]]) -> bool:
        busy[:] = [w["pid"] for w in workers if w["role"] == "decode" and (w["running"] or w["blocks"]["reserved"])]
        return bool(busy)

    cluster.until("a decode worker is busy", found)
    assert len(busy) == 1
    os.kill(busy[0], signal.SIGKILL)


async def test_a_client_that_leaves_takes_all_sequences_with_it(cluster: Cluster) -> None:
    async with AsyncClient(cluster.target) as client, begin(client, prompt_of(50, seed=9), 500) as stream:
        async for _ in stream:
            if len(stream.tokens) == 3 * N:
                break
    cluster.until_nothing_is_held()


async def test_more_sequences_than_there_may_be_are_refused(cluster: Cluster) -> None:
    async with AsyncClient(cluster.target) as client:
        assert (await client.get_model()).max_n == 16
        with pytest.raises(InvalidArgument, match=r"n: must be 1 \.\. 16, not 17") as caught:
            await client.generate("a", n=17).collect()
    assert caught.value.field == "n"


def test_decode_alone_gives_the_same_answers(tmp_path: Path) -> None:
    with running_cluster(tmp_path / "log", *FLAGS, "--prefill", "0", "--decode", "1") as alone:
        prompt = prompt_of(70, seed=13)
        for max_tokens in (24, 1):
            result = asyncio.run(ask(alone.target, prompt, max_tokens))
            expected = [answer_of(case) for case in singles(prompt, max_tokens)]
            assert [choice.token_ids for choice in result.choices] == expected
            assert {(c.prefill_worker, c.decode_worker, c.hand_off) for c in result.choices} == {
                ("", alone.topology()[0]["id"], None)
            }
        alone.until_nothing_is_held()
