"""The real `openai` client against a real cluster: what it asks for it gets, and what goes wrong it understands."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI, OpenAI
from support.cluster import Cluster, running_cluster

from kvrelay.client import AsyncClient, Client

pytestmark = pytest.mark.e2e

FLAGS = ("--http", "127.0.0.1:0", "--transport", "grpc", "--num-blocks", "256")
MODEL = "hash"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    log = tmp_path_factory.mktemp("openai") / "log"
    with running_cluster(log, "--executor", "hash", *FLAGS) as cluster:
        yield cluster


def options(cluster: Cluster) -> dict[str, Any]:
    return {"base_url": f"{cluster.http}/v1", "api_key": "none", "max_retries": 0, "timeout": 30.0}


@pytest.fixture
def client(cluster: Cluster) -> Iterator[OpenAI]:
    with OpenAI(**options(cluster)) as client:
        yield client


@pytest_asyncio.fixture
async def client_of_many(cluster: Cluster) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(**options(cluster)) as client:
        yield client


def test_a_completion_is_what_grpc_gives_for_the_same_seed(cluster: Cluster, client: OpenAI) -> None:
    with Client(cluster.target) as grpc:
        for seed in range(5):
            expected = grpc.generate("Once upon a time", max_tokens=40, seed=seed, ignore_eos=True).collect()
            answer = client.completions.create(
                model=MODEL, prompt="Once upon a time", max_tokens=40, seed=seed, extra_body={"ignore_eos": True}
            )
            assert answer.choices[0].text == expected.text
            assert answer.choices[0].finish_reason == "length"
            assert answer.usage is not None
            assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (16, 40)
            assert answer.usage.prompt_tokens_details is not None


def test_the_pieces_of_a_stream_join_to_the_whole(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": "abc", "max_tokens": 60, "seed": 3}
    whole = client.completions.create(**asked, extra_body={"ignore_eos": True})
    stream = client.completions.create(
        **asked, extra_body={"ignore_eos": True}, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    texts = [chunk.choices[0].text for chunk in chunks if chunk.choices]
    assert len(texts) == 61
    assert "".join(texts) == whole.choices[0].text
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 60


def test_several_answers_and_prompts(client: OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=["a", "b"], n=3, max_tokens=12, seed=9)
    assert [c.index for c in answer.choices] == list(range(6))
    alone = client.completions.create(model=MODEL, prompt="b", n=3, max_tokens=12, seed=9)
    assert [c.text for c in answer.choices[3:]] == [c.text for c in alone.choices]
    assert len({c.text for c in alone.choices}) == 3


def test_token_ids_are_a_prompt_too(client: OpenAI) -> None:
    text = client.completions.create(model=MODEL, prompt="abc", max_tokens=9, temperature=0)
    ids = client.completions.create(model=MODEL, prompt=list(b"abc"), max_tokens=9, temperature=0)
    assert text.choices[0].text == ids.choices[0].text


def test_log_probabilities_are_those_of_grpc(cluster: Cluster, client: OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="abc", max_tokens=8, temperature=0, logprobs=3)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    with Client(cluster.target) as grpc:
        tokens = list(grpc.generate("abc", max_tokens=8, temperature=0.0, logprobs=3))
    given = [token.logprobs for token in tokens]
    assert all(given)
    assert logprobs.token_logprobs == [one.token for one in given if one]
    assert logprobs.tokens is not None
    assert logprobs.top_logprobs is not None
    assert [sorted(top.values(), reverse=True) for top in logprobs.top_logprobs] == [
        [logprob for _, logprob in one.top] for one in given if one
    ]


def test_echo_stop_and_bias(client: OpenAI) -> None:
    biased: dict[str, Any] = {"model": MODEL, "prompt": "say:", "temperature": 0, "logit_bias": {str(ord("z")): 100}}
    assert client.completions.create(**biased, max_tokens=4).choices[0].text == "zzzz"
    assert client.completions.create(**biased, max_tokens=4, echo=True).choices[0].text == "say:zzzz"
    stopped = client.completions.create(**biased, max_tokens=9, stop=["zz"])
    assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == ("", "stop")
    kept = client.completions.create(
        **biased, max_tokens=9, stop=["zz"], extra_body={"include_stop_str_in_output": True}
    )
    assert kept.choices[0].text == "zz"


def test_models(client: OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == MODEL
    assert client.models.retrieve(MODEL).id == MODEL


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10**9}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"logit_bias": {"400": 1}}, "logit_bias[400]"),
        ({"stop": [""]}, "stop[0]"),
        ({"suffix": "x"}, "suffix"),
        ({"logprobs": 99}, "logprobs"),
        ({"n": 99}, "n"),
        ({"prompt": [1, 999]}, "prompt[1]"),
    ],
)
def test_a_bad_request_names_its_parameter(client: OpenAI, asked: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(**{"model": MODEL, "prompt": "x", **asked})
    assert refused.value.param == param
    assert param in refused.value.message


def test_another_model_is_not_found(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        client.completions.create(model="gpt-4", prompt="x")
    assert (refused.value.code, refused.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_ids_of_the_call_are_told(client: OpenAI) -> None:
    given = client.completions.create(model=MODEL, prompt="x", max_tokens=1, extra_headers={"x-request-id": "mine"})
    assert given._request_id == "mine"
    own = client.completions.create(model=MODEL, prompt="x", max_tokens=1)
    assert own.id == f"cmpl-{own._request_id}"


async def test_clients_that_leave_give_everything_back(cluster: Cluster, client_of_many: AsyncOpenAI) -> None:
    """Half of them inside a stream, half while they wait for a whole answer."""

    async def leave(number: int) -> None:
        asked: dict[str, Any] = {"model": MODEL, "prompt": f"leave {number}", "max_tokens": 3000}
        more = {"ignore_eos": True}
        if number % 2:
            stream = await client_of_many.completions.create(**asked, stream=True, extra_body=more)
            async for _ in stream:
                break
            await stream.close()
            return
        waiting = asyncio.ensure_future(client_of_many.completions.create(**asked, extra_body=more))
        await asyncio.sleep(0.05)  # somewhere in the middle
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)

    await asyncio.gather(*(leave(number) for number in range(16)))
    await asyncio.to_thread(cluster.until_nothing_is_held)
    async with AsyncClient(cluster.target) as grpc:
        assert (await grpc.topology())["open_requests"] == 0


def test_a_full_cluster_answers_429_with_a_time(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("full")
    config = folder / "kvrelay.toml"
    config.write_text("[coordinator]\nopen_limit = 1\n")
    flags = ("--executor", "hash", *FLAGS, "--step-seconds", "0.05", "--config", str(config))
    with running_cluster(folder / "log", *flags) as cluster, OpenAI(**options(cluster)) as client:
        stream = client.completions.create(
            model=MODEL, prompt="x", max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        with pytest.raises(openai.RateLimitError) as refused:
            client.completions.create(model=MODEL, prompt="y")
        assert int(refused.value.response.headers["retry-after"]) >= 1
        assert refused.value.code == "rate_limit_exceeded"
        stream.close()
        patient = client.with_options(max_retries=5)
        assert patient.completions.create(model=MODEL, prompt="y", max_tokens=2).usage is not None


@pytest.fixture(scope="module")
def model_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    log = tmp_path_factory.mktemp("openai-model") / "log"
    with running_cluster(log, "--model", "smollm2-135m-instruct", "--http", "127.0.0.1:0") as cluster:
        yield cluster


@pytest.mark.model
def test_chats_of_a_model(model_cluster: Cluster) -> None:
    name, asked = "smollm2-135m-instruct", [{"role": "user", "content": "What is the capital of France?"}]
    with OpenAI(**options(model_cluster)) as client:
        whole = client.chat.completions.create(model=name, messages=asked, temperature=0, max_completion_tokens=16)  # type: ignore[arg-type]
        assert "Paris" in (whole.choices[0].message.content or "")
        stream = client.chat.completions.create(
            model=name,
            messages=asked,  # type: ignore[arg-type]
            temperature=0,
            max_completion_tokens=16,
            stream=True,
            logprobs=True,
            top_logprobs=2,
        )
        chunks = [chunk.choices[0] for chunk in stream]
        assert chunks[0].delta.role == "assistant"
        assert "".join(c.delta.content or "" for c in chunks) == whole.choices[0].message.content
        tokens = [one for c in chunks if c.logprobs for one in c.logprobs.content or ()]
        assert len(tokens) == whole.usage.completion_tokens if whole.usage else False
        assert all(one.logprob <= 0.0 and one.top_logprobs[0].logprob == one.logprob for one in tokens)


@pytest.mark.model
def test_an_answer_that_is_held_to_a_schema(model_cluster: Cluster) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "people": {"type": "integer"}},
        "required": ["city", "people"],
        "additionalProperties": False,
    }
    with OpenAI(**options(model_cluster)) as client:
        answer = client.chat.completions.create(
            model="smollm2-135m-instruct",
            messages=[{"role": "user", "content": "Tell me about a city."}],
            response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": schema}},
            temperature=0,
            max_completion_tokens=60,
        )
    said = json.loads(answer.choices[0].message.content or "")
    assert set(said) == {"city", "people"}
