"""`generate --local` and a cluster answer alike, whatever is asked for; a chat goes on where the context is full."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest
from support.cluster import Cluster, running_cluster
from support.tiny_llama import random_llama

from kvrelay.cli.ask import ask_cluster
from kvrelay.cli.local import ask_local
from kvrelay.client import Client
from kvrelay.errors import InvalidArgument

REQUESTS = {
    "min_p": {"min_p": 0.2},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": -0.25},
    "greedy with penalties": {"temperature": 0.0, "repetition_penalty": 1.5},
    "biases": {"logit_bias": {65: 100.0, 66: 99.5, 256: -100.0}},
    "log-probabilities": {"logprobs": 3},
    "of the drawn token alone": {"logprobs": 0, "top_k": 5},
    "fewest tokens": {"min_tokens": 5, "stop_token_ids": list(range(0, 258, 2)), "include_stop": True},
    "stop string": {"logit_bias": {65: 100.0, 66: 99.0}, "stop": ["AB", "BA"], "include_stop": True, "min_tokens": 3},
    "echo": {"echo": True, "truncate_prompt": 7},
    "special tokens": {"logit_bias": {257: 100.0}, "skip_special_tokens": False},
    "JSON": {"json_schema": {"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"]}},
    "regex": {"regex": "[a-f]{3}-[0-9]+x", "logprobs": 1},
    "choice": {"choice": ["north", "south"], "n": 3},
    "lark": {"lark": 'start: WORD (" " WORD)*\nWORD: /[a-z]{2}/'},
    "ebnf": {"ebnf": 'root ::= "(" root ")" | "x"'},
    "several with penalties": {"n": 4, "frequency_penalty": 1.5, "logprobs": 2},
    "all at once": {
        "regex": "[a-z ]+",
        "repetition_penalty": 1.2,
        "logit_bias": {101: 3.0},
        "min_p": 0.01,
        "logprobs": 2,
        "min_tokens": 4,
        "n": 2,
    },
}
PROMPT = "Once upon a time, in a land of 8 kings, there was a cluster that told stories."


class Silent:
    def prompt(self, text: str) -> None: ...

    def text(self, piece: str) -> None: ...

    def choice(self, choice: object) -> None: ...


def told(result):
    """All of an answer but how and when it came about."""
    choices = [(c.token_ids, c.text, c.finish_reason, c.logprobs) for c in result.choices]
    return result.prompt_text, result.seed, result.usage.prompt_tokens, choices


@pytest.mark.parametrize("name", REQUESTS)
def test_one_process_and_a_cluster_answer_alike(hash_cluster: Cluster, name: str) -> None:
    options = {"max_tokens": 24, "seed": 11} | REQUESTS[name]
    split = ask_cluster(hash_cluster.target, options)(PROMPT, Silent())
    whole = ask_local({"executor": "hash", "num_blocks": 64}, options)(PROMPT, Silent())
    assert told(split) == told(whole)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"min_p": 1.5}, "sampling.min_p"),
        ({"logit_bias": {258: 1.0}}, "sampling.logit_bias[258]"),
        ({"regex": "("}, "regex"),
        ({"json_schema": "{"}, "json_schema"),
        ({"truncate_prompt": 0}, "truncate_prompt"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_both_refuse_alike(hash_cluster: Cluster, options: dict, field: str) -> None:
    refusals = []
    for ask in (ask_cluster(hash_cluster.target, options), ask_local({"executor": "hash", "num_blocks": 64}, options)):
        with pytest.raises(InvalidArgument) as caught:
            ask(PROMPT, Silent())
        refusals.append((caught.value.field, caught.value.message))
    assert refusals[0] == refusals[1]
    assert refusals[0][0] == field


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(random_llama(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture(scope="module")
def llama_cluster(llama: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """12 blocks of 16 tokens: the context limit is 192."""
    log = tmp_path_factory.mktemp("llama") / "log"
    flags = ("--model", llama, "--dtype", "float32", "--num-blocks", "12", "--transport", "grpc")
    with running_cluster(log, *flags) as cluster:
        yield cluster


def test_a_chat_with_tools_is_rendered_and_answered_alike(llama: str, llama_cluster: Cluster) -> None:
    options = {"max_tokens": 12, "seed": 5, "echo": True, "repetition_penalty": 1.2, "logprobs": 2}
    options |= {"tools": [{"type": "function"}], "skip_special_tokens": False}
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]
    split = ask_cluster(llama_cluster.target, options)(messages, Silent())
    engine = {"model": llama, "dtype": "float32", "num_blocks": 12}
    whole = ask_local(engine, options)(messages, Silent())
    tokens = [([t for t, _ in one.top], round(one.token, 3)) for one in split.logprobs]
    assert tokens == [([t for t, _ in one.top], round(one.token, 3)) for one in whole.logprobs]
    assert (split.token_ids, split.text, split.prompt_text) == (whole.token_ids, whole.text, whole.prompt_text)
    assert split.prompt_text == "<|bos|>user\nhi<|eos|>\n<|bos|>assistant\n<|eos|>\n<|bos|>assistant\n"


def test_a_conversation_goes_on_where_the_context_is_full(llama_cluster: Cluster) -> None:
    command = [sys.executable, "-m", "kvrelay.cli.main", "chat", "--target", llama_cluster.target]
    flags = ["--json", "--max-tokens", "20", "--seed", "3", "--system", "short"]
    said = "".join(f"turn number {number}\n" for number in range(6))
    done = subprocess.run([*command, *flags], input=said, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    turns = [json.loads(line) for line in done.stdout.splitlines()]
    assert [turn["turn"] for turn in turns] == [1, 2, 3, 4, 5, 6]
    left_out = [turn["left_out"] for turn in turns]
    assert left_out == sorted(left_out)
    assert 0 < left_out[-1] < 5
    assert turns[1]["usage"]["cached_tokens"] > 0
    messages = [{"role": "system", "content": "short"}]
    for number in range(left_out[-1], 5):
        messages += [
            {"role": "user", "content": f"turn number {number}"},
            {"role": "assistant", "content": turns[number]["text"]},
        ]
    messages.append({"role": "user", "content": "turn number 5"})
    with Client(llama_cluster.target) as client:
        again = client.generate(messages, max_tokens=20, seed=3).collect()
    assert (again.text, again.usage.prompt_tokens) == (turns[5]["text"], turns[5]["usage"]["prompt_tokens"])
