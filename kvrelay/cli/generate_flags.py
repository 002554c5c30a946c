"""The flags of `generate` that go together, and what they say of a request. How tokens are drawn: sampling_flags."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from kvrelay.config import DTYPES, EXECUTORS

if TYPE_CHECKING:
    from kvrelay.client.options import GenerateOptions

PROMPT = "The prompt"
ENDING = "Where the answer ends"
CONSTRAINT = "What the answer must be (one of these)"
OUTPUT = "What is printed"
ENGINE = "The engine of --local"


@dataclass(frozen=True, slots=True)
class PromptFlags:
    tokens: Annotated[
        str,
        typer.Option(metavar="FILE", help="As token ids: a JSON list or numbers; - is stdin.", rich_help_panel=PROMPT),
    ] = ""
    chat: Annotated[bool, typer.Option("--chat", help="Apply the model's chat template.", rich_help_panel=PROMPT)] = (
        False
    )
    truncate_prompt: Annotated[
        int | None, typer.Option(metavar="N", help="Use only the last N tokens of it.", rich_help_panel=PROMPT)
    ] = None
    no_prefix_cache: Annotated[
        bool,
        typer.Option("--no-prefix-cache", help="Neither use nor fill caches of prompts.", rich_help_panel=PROMPT),
    ] = False

    def options(self) -> GenerateOptions:
        return {
            "truncate_prompt": self.truncate_prompt,
            "prefix_cache": False if self.no_prefix_cache else None,
        }


@dataclass(frozen=True, slots=True)
class EndingFlags:
    max_tokens: Annotated[int, typer.Option(help="Most tokens of the answer.", rich_help_panel=ENDING)] = 128
    min_tokens: Annotated[
        int | None, typer.Option(help="Fewest tokens: nothing else ends it before.", rich_help_panel=ENDING)
    ] = None
    stop: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="End before this text; may be repeated.", rich_help_panel=ENDING),
    ] = None
    include_stop: Annotated[
        bool, typer.Option("--include-stop", help="Print the text that ended it too.", rich_help_panel=ENDING)
    ] = False
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on after the end of the text.", rich_help_panel=ENDING)
    ] = False

    def options(self) -> GenerateOptions:
        return {
            "max_tokens": self.max_tokens,
            "min_tokens": self.min_tokens,
            "stop": self.stop or (),
            "include_stop": self.include_stop or None,
            "ignore_eos": self.ignore_eos,
        }


@dataclass(frozen=True, slots=True)
class ConstraintFlags:
    json_schema: Annotated[
        str | None,
        typer.Option(metavar="FILE|TEXT", help="JSON of this schema; {} is any object.", rich_help_panel=CONSTRAINT),
    ] = None
    regex: Annotated[
        str | None, typer.Option(help="Text that this matches from end to end.", rich_help_panel=CONSTRAINT)
    ] = None
    choice: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="One of these texts; repeated.", rich_help_panel=CONSTRAINT),
    ] = None
    lark: Annotated[
        str | None, typer.Option(metavar="FILE", help="A grammar in Lark's notation.", rich_help_panel=CONSTRAINT)
    ] = None
    ebnf: Annotated[str | None, typer.Option(metavar="FILE", help="A grammar in GBNF.", rich_help_panel=CONSTRAINT)] = (
        None
    )

    def options(self) -> GenerateOptions:
        """Reads their files. InvalidArgument names the flag whose file cannot be read."""
        return {
            "json_schema": _schema(self.json_schema),
            "regex": self.regex,
            "choice": self.choice or None,
            "lark": _file(self.lark, "lark"),
            "ebnf": _file(self.ebnf, "ebnf"),
        }


@dataclass(frozen=True, slots=True)
class OutputFlags:
    echo: Annotated[bool, typer.Option("--echo", help="The prompt before the answer.", rich_help_panel=OUTPUT)] = False
    keep_special: Annotated[
        bool, typer.Option("--keep-special", help="Special tokens as text too.", rich_help_panel=OUTPUT)
    ] = False
    logprobs: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="With --json: log-probabilities of the tokens and the N likeliest.",
            rich_help_panel=OUTPUT,
        ),
    ] = None
    json_output: Annotated[
        bool, typer.Option("--json", help="One JSON object at the end, no streaming.", rich_help_panel=OUTPUT)
    ] = False

    def options(self) -> GenerateOptions:
        return {
            "echo": self.echo or None,
            "skip_special_tokens": False if self.keep_special else None,
            "logprobs": self.logprobs,
        }


@dataclass(frozen=True, slots=True)
class EngineFlags:
    """As a worker's own of these names; None where not given."""

    dtype: Annotated[str | None, typer.Option(help=f"{' or '.join(DTYPES)}.", rich_help_panel=ENGINE)] = None
    executor: Annotated[str | None, typer.Option(help=f"{', '.join(EXECUTORS)}.", rich_help_panel=ENGINE)] = None
    threads: Annotated[int | None, typer.Option(help="Compute threads.", rich_help_panel=ENGINE)] = None
    num_blocks: Annotated[int | None, typer.Option(help="Blocks of the KV pool.", rich_help_panel=ENGINE)] = None
    block_size: Annotated[int | None, typer.Option(help="Token slots of a block.", rich_help_panel=ENGINE)] = None
    step_tokens: Annotated[
        int | None, typer.Option(help="Most tokens of one forward pass.", rich_help_panel=ENGINE)
    ] = None
    attention: Annotated[str | None, typer.Option(help="auto, cpu or reference.", rich_help_panel=ENGINE)] = None
    script: Annotated[
        str | None, typer.Option(metavar="FILE", help="Token ids of --executor scripted.", rich_help_panel=ENGINE)
    ] = None

    @property
    def settings(self) -> dict[str, object]:
        return asdict(self)


def _schema(given: str | None) -> str | None:
    """A schema is an object: what begins with { is the text itself, all else the name of a file."""
    return given if given is None or given.lstrip().startswith("{") else _file(given, "json_schema")


def _file(path: str | None, field: str) -> str | None:
    from kvrelay.cli.prompt import read_file_text

    return None if path is None else read_file_text(path, field)
