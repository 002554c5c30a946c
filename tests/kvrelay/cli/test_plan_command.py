"""`kvrelay plan` as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvrelay.cli.app import app
from kvrelay.models.presets import PRESETS

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "vocab_size": 300,
    "max_position_embeddings": 2048,
}


def run(*arguments: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["plan", *arguments])
    return done.exit_code, done.stdout, done.stderr


def test_the_preset_is_planned_with_the_worked_figures() -> None:
    code, out, _ = run("--model-preset", "llama-3-8b", "--long-prompt", "32768", "--json")
    made = json.loads(out)
    assert code == 0
    assert made["name"] == "llama-3-8b"
    assert made["pool"]["num_tokens"] == 411_525
    assert [len(made["long_prompt"][kind]) for kind in ("chunks", "mixed")] == [16, 17]
    assert {step["num_sequences"]: round(step["tokens_per_s"]) for step in made["steps"]}[408] == 19_655


def test_tables_show_what_fits_and_the_steps() -> None:
    code, out, _ = run("--model-preset", "llama-3-8b", "--long-prompt", "32768")
    assert code == 0
    assert "411,525 tokens, 25,720 blocks of 16" in out
    assert "Its chunks on a prefill worker: 16 steps" in out
    assert "Note: a prompt of 32768 tokens" in out


def test_a_directory_needs_no_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    code, out, _ = run(str(tmp_path), "--memory-gb", "4", "--json")
    assert code == 0
    assert json.loads(out)["model"]["token_bytes"] == 2 * 2 * 2 * 16 * 2


def test_the_help_names_every_preset() -> None:
    code, out, _ = run("--help")
    assert code == 0
    assert all(name in out for name in PRESETS)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (("--model-preset", "llama-3-80b"), "--model-preset"),
        (("./nowhere",), "model"),
        (("--model-preset", "llama-3-70b"), "--memory-gb"),
    ],
)
def test_errors_name_their_field(arguments: tuple[str, ...], field: str) -> None:
    code, out, err = run(*arguments, "--json")
    assert (code, out) == (1, "")
    assert json.loads(err)["error"]["field"] == field


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("x", "--model-preset", "llama-3-8b"),
        ("x", "--usable", "1.5"),
        ("x", "--memory-gb", "nan"),
        ("x", "--rate", "0"),
        ("x", "--reserve-gb", "-1"),
        ("x", "--dtype", "int4"),
    ],
)
def test_wrong_usage_exits_2(arguments: tuple[str, ...]) -> None:
    code, _, err = run(*arguments)
    assert code == 2
    assert not arguments or len(arguments) != 3 or arguments[1] in err
