"""Everything a request may ask of sampling, over hand-off and a worker killed in mid-stream: nothing changes.

The reference is one process (`generate --local`), token for token and log-probability for log-probability.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jsonschema
import pytest
from support.cluster import Cluster, running_cluster
from support.door import until

from kvrelay.cli.local import ask_local
from kvrelay.client import AsyncClient, AsyncStream, Choice, GenerateOptions, GenerateResult

pytestmark = pytest.mark.e2e

EOS = 256
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "colours": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 6, "maxItems": 9},
        "age": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["name", "colours", "age"],
    "additionalProperties": False,
}
LONG: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True}
PENALTIES: dict[str, Any] = {"repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": 0.4}
CASES: dict[str, GenerateOptions] = {
    "greedy penalties": GenerateOptions(temperature=0.0, logprobs=5, **PENALTIES, **LONG),
    "drawn penalties": GenerateOptions(seed=5, logprobs=0, **PENALTIES, **LONG),
    "n penalties": GenerateOptions(seed=6, n=3, logprobs=2, **PENALTIES, **LONG),
    "bias and min_p": GenerateOptions(seed=7, logit_bias={97: 6.0, 98: 5.5, 99: -100.0}, min_p=0.05, **LONG),
    "min_tokens": GenerateOptions(seed=8, logit_bias={EOS: 100.0}, min_tokens=40, max_tokens=60),
    "regex": GenerateOptions(seed=9, regex="[0-9]{50}", logprobs=1, max_tokens=60),
    "json_schema": GenerateOptions(seed=10, json_schema=json.dumps(SCHEMA), max_tokens=400),
}


@dataclass
class Silent:
    """Hears of a local answer and says nothing."""

    def text(self, piece: str) -> None: ...

    def choice(self, choice: Choice) -> None: ...


def prompt_of(number: int) -> list[int]:
    return [(number * 31 + i * i) % 250 for i in range(70)]


def alone(number: int, options: GenerateOptions) -> GenerateResult:
    return ask_local({"executor": "hash", "num_blocks": 512}, options)(prompt_of(number), Silent())


def told(result: GenerateResult) -> list[tuple[object, ...]]:
    return [(c.token_ids, c.text, c.finish_reason, c.logprobs, c.usage.completion_tokens) for c in result.choices]


@pytest.fixture(scope="module")
def references() -> dict[str, GenerateResult]:
    return {name: alone(number, options) for number, (name, options) in enumerate(CASES.items())}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    log = tmp_path_factory.mktemp("moved") / "log"
    flags = ("--executor", "hash", "--step-seconds", "0.02", "--step-tokens", "32")
    with running_cluster(log, *flags, "--prefill", "2", "--decode", "2") as cluster:
        yield cluster


async def ask_all(target: str, tokens_before: int, then: Any = None) -> dict[str, GenerateResult]:
    """All cases at once; `then` is called when each stream has shown so many tokens."""
    async with AsyncClient(target) as client:
        streams: dict[str, AsyncStream] = {
            name: client.generate(prompt_of(number), deadline_s=100.0, **options)
            for number, (name, options) in enumerate(CASES.items())
        }
        reading = [asyncio.create_task(stream.collect()) for stream in streams.values()]
        await until(lambda: min(len(stream.tokens) for stream in streams.values()) >= tokens_before, 60.0)
        if then is not None:
            then()
        results = await asyncio.gather(*reading)
        return dict(zip(streams, results, strict=True))


async def test_split_answers_are_those_of_one_process(cluster: Cluster, references: dict[str, GenerateResult]) -> None:
    results = await ask_all(cluster.target, 0)
    for name, result in results.items():
        assert told(result) == told(references[name]), name
    cluster.until_nothing_is_held()


def test_the_references_are_what_was_asked_for(references: dict[str, GenerateResult]) -> None:
    logprobs = references["greedy penalties"].choices[0].logprobs
    assert [len(one.top) for one in logprobs] == [5] * 60
    assert [len(one.top) for one in references["drawn penalties"].choices[0].logprobs] == [0] * 60
    assert len(references["n penalties"].choices) == 3
    at_floor = references["min_tokens"].choices[0]
    assert (at_floor.finish_reason, len(at_floor.token_ids), at_floor.token_ids[-1]) == ("stop", 41, EOS)
    assert re.fullmatch("[0-9]{50}", references["regex"].text)
    jsonschema.validate(json.loads(references["json_schema"].text), SCHEMA)


async def test_a_worker_killed_in_mid_stream_changes_no_token_and_no_log_probability(
    cluster: Cluster, references: dict[str, GenerateResult]
) -> None:
    victim = cluster.pids()["decode-0"]
    results = await ask_all(cluster.target, 6, lambda: os.kill(victim, signal.SIGKILL))
    moved = sum(choice.migrations > 0 for result in results.values() for choice in result.choices)
    assert moved
    for name, result in results.items():
        assert told(result) == told(references[name]), name
    cluster.until("all serve again", lambda workers: len(workers) == 4, 20.0)
    cluster.until_nothing_is_held()


async def test_sixteen_seeds_at_once_are_each_what_they_are_alone(cluster: Cluster) -> None:
    async with AsyncClient(cluster.target) as client:

        async def ask(seed: int) -> tuple[int, ...]:
            answer = await client.generate(prompt_of(99), seed=seed, max_tokens=16, ignore_eos=True).collect()
            return answer.token_ids

        together = await asyncio.gather(*(ask(seed) for seed in range(16)))
        assert [await ask(seed) for seed in range(16)] == together
    assert len(set(together)) == 16


async def test_constrained_answers_are_valid_200_times_of_200_with_a_worker_killed_in_between(cluster: Cluster) -> None:
    limit = asyncio.Semaphore(16)
    migrations: list[int] = []
    async with AsyncClient(cluster.target) as client:

        async def ask(seed: int) -> None:
            which: dict[str, Any] = {"regex": "[a-f]{12}"} if seed % 2 else {"json_schema": json.dumps(SCHEMA)}
            async with limit:
                stream = client.generate(prompt_of(seed), seed=seed, max_tokens=400, deadline_s=100.0, **which)
                result = await stream.collect()
            migrations.append(result.migrations)
            assert result.finish_reason == "stop"
            if seed % 2:
                assert re.fullmatch("[a-f]{12}", result.text)
            else:
                jsonschema.validate(json.loads(result.text), SCHEMA)

        asked = [asyncio.create_task(ask(seed)) for seed in range(200)]
        await until(lambda: len(migrations) >= 20, 60.0)
        os.kill(cluster.pids()["decode-1"], signal.SIGKILL)
        await asyncio.gather(*asked)
    assert len(migrations) == 200
    assert sum(migrations) > 0
