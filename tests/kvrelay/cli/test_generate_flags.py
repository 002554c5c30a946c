"""What the flags of `kvrelay generate` make of a request, and what it prints of what it asked for."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from kvrelay.cli import ask
from kvrelay.cli.app import app
from kvrelay.client import Choice, GenerateResult, Logprobs, Usage


class Asked:
    """Stands where a cluster is asked: keeps the options, answers with one token."""

    def __init__(self) -> None:
        self.options: dict[str, object] = {}

    def __call__(self, target, options):
        self.options = {key: value for key, value in options.items() if value not in (None, (), {})}
        return self.answer

    def answer(self, prompt, listener):
        echo, n = bool(self.options.get("echo")), int(self.options.get("n", 1))
        if echo:
            listener.prompt(prompt)
        logprobs = (Logprobs(-0.5, ((7, -0.25),)),) if "logprobs" in self.options else ()
        usage = Usage(3, 1, 0)
        choices = [
            Choice(s, (7,), "answer", "answer", "stop", usage, 1.0, (), "p", "d", None, 0, logprobs) for s in range(n)
        ]
        for choice in choices:
            listener.choice(choice)
        return GenerateResult.of("r", 1, "m", choices, prompt if echo else "")


@pytest.fixture
def asked(monkeypatch):
    asked = Asked()
    monkeypatch.setattr(ask, "ask_cluster", asked)
    return asked


def generate(*arguments: str):
    return CliRunner().invoke(app, ["generate", *arguments])


ALWAYS = {"max_tokens": 128, "ignore_eos": False, "model": ""}


def test_without_flags_nothing_but_the_clients_own_defaults_is_asked_for(asked):
    assert generate("hi").output == "answer\n"
    assert {key: value for key, value in asked.options.items() if value != ""} == {
        "max_tokens": 128,
        "ignore_eos": False,
    }


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        ("--min-p 0.1 --repetition-penalty 1.2", {"min_p": 0.1, "repetition_penalty": 1.2}),
        ("--presence-penalty -0.5 --frequency-penalty 2", {"presence_penalty": -0.5, "frequency_penalty": 2.0}),
        ("--logit-bias 7=-100 --logit-bias 8=2.5", {"logit_bias": {7: -100.0, 8: 2.5}}),
        ("--json --logprobs 0", {"logprobs": 0}),
        ("--min-tokens 4 --include-stop", {"min_tokens": 4, "include_stop": True}),
        ("--echo --keep-special", {"echo": True, "skip_special_tokens": False}),
        ("--truncate-prompt 9 --priority batch", {"truncate_prompt": 9, "priority": "batch"}),
        ("--regex a+", {"regex": "a+"}),
        ("--choice yes --choice no", {"choice": ["yes", "no"]}),
        ('--json-schema {"type":"array"}', {"json_schema": '{"type":"array"}'}),
    ],
)
def test_flags_are_the_clients_options(asked, flags, options):
    assert generate(*flags.split(), "hi").exit_code == 0
    assert asked.options == ALWAYS | options


@pytest.mark.parametrize("name", ["json-schema", "lark", "ebnf"])
def test_schemas_and_grammars_come_from_files(asked, tmp_path, name):
    (tmp_path / "file").write_text("start: é", encoding="utf-8")
    assert generate(f"--{name}", str(tmp_path / "file"), "hi").exit_code == 0
    assert asked.options[name.replace("-", "_")] == "start: é"


def test_a_file_that_cannot_be_read_is_an_error_of_its_flag():
    done = generate("--json", "--lark", "/nowhere/grammar", "hi")
    assert (done.exit_code, done.stdout) == (1, "")
    assert json.loads(done.stderr)["error"] == {
        "code": "INVALID_ARGUMENT",
        "message": "cannot read /nowhere/grammar: No such file or directory",
        "field": "lark",
    }


def test_two_constraints_are_refused_before_anything_is_sent():
    done = generate("--json", "--regex", "a", "--choice", "b", "hi")
    assert done.exit_code == 1
    assert json.loads(done.stderr)["error"]["field"] == "choice"


@pytest.mark.parametrize("entry", ["7", "a=1", "7=much", "=1"])
def test_a_bias_that_is_not_id_and_value_is_wrong_usage(entry):
    done = generate("--logit-bias", entry, "hi")
    assert done.exit_code == 2
    assert f"--logit-bias must be ID=VALUE, not '{entry}'" in done.stderr


def test_a_class_of_priority_that_there_is_not_is_wrong_usage():
    assert generate("--priority", "high", "hi").exit_code == 2


def test_an_echo_stands_before_the_answer_and_before_each_of_several(asked):
    assert generate("--echo", "once ").stdout == "once answer\n"
    assert generate("--echo", "-n", "2", "once ").stdout == "once answer\nonce answer\n"
    assert json.loads(generate("--echo", "--json", "once ").stdout)["prompt_text"] == "once "


def test_log_probabilities_are_in_the_json_of_each_answer(asked):
    told = [{"logprob": -0.5, "top": [{"token_id": 7, "logprob": -0.25}]}]
    answer = json.loads(generate("--json", "--logprobs", "1", "-n", "2", "hi").stdout)
    assert answer["logprobs"] == told
    assert [choice["logprobs"] for choice in answer["choices"]] == [told, told]
    assert "logprobs" not in json.loads(generate("--json", "hi").stdout)


def test_help_shows_options_that_go_together_under_one_heading():
    lines = CliRunner().invoke(app, ["generate", "--help"]).output.splitlines()
    headings = [line for line in lines if line and not line.startswith((" ", "Usage"))]
    assert headings == [
        "Arguments:",
        "The prompt:",
        "How tokens are drawn:",
        "Where the answer ends:",
        "What the answer must be (one of these):",
        "What is printed:",
        "The engine of --local:",
        "Options:",
    ]
