"""How answers end, through real processes: at token 0, 1 or 2, by length, EOS, stop token and stop string."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from support.cluster import Cluster, running_cluster
from support.golden import Case
from support.streams import answer_of, case_of

from kvrelay.client import AsyncClient, GenerateResult
from kvrelay.models.builtin import BUILTIN_EOS

pytestmark = pytest.mark.e2e

TEXT = "한국어 👩‍👩‍👧‍👦 🇰🇷 끝"
SCRIPT = [BUILTIN_EOS, *TEXT.encode()]


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Token 0 is EOS; whoever ignores it gets TEXT, a byte a token, then EOS for ever."""
    directory = tmp_path_factory.mktemp("scripted")
    script = directory / "script.json"
    script.write_text(json.dumps(SCRIPT))
    flags = ("--executor", "scripted", "--script", str(script), "--transport", "grpc", "--num-blocks", "64")
    with running_cluster(directory / "log", *flags) as cluster:
        yield cluster


def lettered_case() -> tuple[Case, str]:
    """A case of the hash model whose first four tokens are different letters, and those letters."""
    for seed in range(100_000):
        case = case_of(20, 4, seed)
        tokens = answer_of(case)
        if all(chr(t).isascii() and chr(t).isalpha() for t in tokens if t < 128) and max(tokens) < 128:
            letters = "".join(map(chr, tokens))
            if len(set(letters)) == 4:
                return case, letters
    raise AssertionError("no such prompt")


@pytest.fixture(scope="module")
def lettered() -> tuple[Case, str]:
    return lettered_case()


async def generate(target: str, prompt: tuple[int, ...], **options: object) -> GenerateResult:
    """Ask, and check what is true of every answer."""
    async with AsyncClient(target) as client:
        stream = client.generate(list(prompt), temperature=0.0, deadline_s=30.0, **options)  # type: ignore[arg-type]  # options are a test's own
        indexes = [token.index async for token in stream]
    result = stream.result
    assert indexes == list(range(len(indexes)))
    assert result.usage.completion_tokens == len(indexes) == len(result.token_ids)
    assert result.usage.prompt_tokens == len(prompt)
    return result


def until_decode_is_idle(cluster: Cluster) -> None:
    def idle(workers: list[dict[str, object]]) -> bool:
        return all(w["tokens_per_s"] == 0 for w in workers if w["role"] == "decode")

    cluster.until("decode computed nothing lately", idle)


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
async def test_an_answer_by_length_has_exactly_max_tokens(hash_cluster: Cluster, max_tokens: int) -> None:
    case = case_of(20, 3)
    result = await generate(hash_cluster.target, case.prompt, max_tokens=max_tokens, ignore_eos=True)
    assert result.token_ids == answer_of(case)[:max_tokens]
    assert result.finish_reason == "length"
    assert bool(result.decode_worker) == (max_tokens > 1)
    assert (result.hand_off is not None) == (max_tokens > 1)
    if max_tokens > 1:  # so that 0 tokens a second, below, mean something
        hash_cluster.until(
            "decode computed", lambda ws: all(w["tokens_per_s"] > 0 for w in ws if w["role"] == "decode")
        )
    hash_cluster.until_nothing_is_held()


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
async def test_a_stop_string_that_token_0_completes_ends_the_answer_there(
    hash_cluster: Cluster, lettered: tuple[Case, str], max_tokens: int
) -> None:
    case, letters = lettered
    until_decode_is_idle(hash_cluster)
    result = await generate(hash_cluster.target, case.prompt, max_tokens=max_tokens, ignore_eos=True, stop=[letters[0]])
    assert (result.token_ids, result.text, result.finish_reason) == ((ord(letters[0]),), "", "stop")
    assert result.decode_worker == ""
    hash_cluster.until_nothing_is_held()
    assert hash_cluster.worker("decode-0")["tokens_per_s"] == 0


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
async def test_a_stop_token_at_index_0_ends_the_answer_there(hash_cluster: Cluster, max_tokens: int) -> None:
    case = case_of(33, 3)
    until_decode_is_idle(hash_cluster)
    first = answer_of(case)[0]
    result = await generate(hash_cluster.target, case.prompt, max_tokens=max_tokens, stop_token_ids=[first])
    assert (result.token_ids, result.text, result.finish_reason) == ((first,), "", "stop")
    assert result.decode_worker == ""
    hash_cluster.until_nothing_is_held()
    assert hash_cluster.worker("decode-0")["tokens_per_s"] == 0


async def test_a_stop_string_begun_by_token_0_and_completed_by_token_1_is_never_leaked(
    hash_cluster: Cluster, lettered: tuple[Case, str]
) -> None:
    case, letters = lettered
    result = await generate(hash_cluster.target, case.prompt, max_tokens=4, ignore_eos=True, stop=[letters[:2]])
    assert result.token_ids == tuple(map(ord, letters[:2]))
    assert (result.text, result.finish_reason) == ("", "stop")
    hash_cluster.until_nothing_is_held()


async def test_a_stop_string_over_three_tokens_keeps_the_text_before_it(
    hash_cluster: Cluster, lettered: tuple[Case, str]
) -> None:
    case, letters = lettered
    result = await generate(hash_cluster.target, case.prompt, max_tokens=4, ignore_eos=True, stop=[letters[1:4]])
    assert result.token_ids == tuple(map(ord, letters))
    assert (result.text, result.finish_reason) == (letters[0], "stop")


async def test_text_held_back_for_a_stop_string_that_does_not_come_is_sent(
    hash_cluster: Cluster, lettered: tuple[Case, str]
) -> None:
    case, letters = lettered
    stop = letters[1:3] + "\x00"
    result = await generate(hash_cluster.target, case.prompt, max_tokens=4, ignore_eos=True, stop=[stop])
    assert (result.text, result.finish_reason) == (letters, "length")
    result = await generate(hash_cluster.target, case.prompt, max_tokens=3, ignore_eos=True, stop=[stop])
    assert (result.text, result.tail, result.finish_reason) == (letters[:3], letters[1:3], "length")


async def test_a_first_token_that_is_eos_is_the_whole_answer_and_decode_runs_no_step(scripted: Cluster) -> None:
    result = await generate(scripted.target, (1, 2, 3), max_tokens=8)
    assert (result.token_ids, result.text, result.finish_reason) == ((BUILTIN_EOS,), "", "stop")
    assert result.decode_worker == ""
    scripted.until_nothing_is_held()
    assert scripted.worker("decode-0")["tokens_per_s"] == 0


async def test_characters_split_over_tokens_come_out_whole(scripted: Cluster) -> None:
    result = await generate(scripted.target, (1, 2, 3), max_tokens=len(SCRIPT), ignore_eos=True)
    assert result.text == TEXT
    assert result.finish_reason == "length"


async def test_a_stop_string_of_characters_split_over_tokens_is_cut_before_its_first(scripted: Cluster) -> None:
    result = await generate(scripted.target, (1, 2, 3), max_tokens=100, ignore_eos=True, stop=["👧‍👦"])
    assert result.text == "한국어 👩‍👩‍"
    assert result.finish_reason == "stop"
    assert result.token_ids == tuple(SCRIPT[: len(result.token_ids)])
    assert bytes(result.token_ids[1:]).decode().endswith("👧‍👦")
    scripted.until_nothing_is_held()
