"""`kvrelay chat`: a conversation in the terminal, or from a pipe with one turn a line."""

from __future__ import annotations

from typing import Annotated

import typer

from kvrelay.cli.sampling_flags import SamplingFlags
from kvrelay.config import DEFAULT_TARGET

EXAMPLE = (
    "kvrelay chat --system 'You answer in one sentence.'",
    "printf 'Who are you?\\nAnd where?\\n' | kvrelay chat --temperature 0 --json",
)


def chat(
    target: Annotated[str, typer.Option(envvar="KVRELAY_TARGET", help="Coordinator to ask.")] = DEFAULT_TARGET,
    model: Annotated[str, typer.Option(help="Model id.")] = "",
    system: Annotated[str, typer.Option(metavar="TEXT", help="System message, sent before all turns.")] = "",
    max_tokens: Annotated[
        int | None, typer.Option(help="Most tokens of an answer (default 512, or half the context if less).")
    ] = None,
    stop: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="End answers before it; repeatable.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object a turn, no streaming.")] = False,
    *,
    drawing: SamplingFlags,
) -> None:
    """Talk with the model: what was said before is sent with every turn, and answers stream to stdout.

    After each answer one line on stderr says how it came about: tokens, time to the first, time between them, the
    workers, what was handed over. Lines that begin with / are commands: /help lists them. A line that ends with a
    backslash goes on in the next one. From a pipe each line is a turn.

    Ctrl-C during an answer cancels it; what came of it stays in the conversation. Ctrl-C or Ctrl-D at the prompt
    leaves. When the context is full, the oldest turns are no longer sent; the system message always is.

    Errors are shown and the conversation goes on; the turn that failed is forgotten. Exit code 0; 1 if the model cannot
    be reached or cannot chat, or if a turn from a pipe failed; 2 for wrong usage.
    """
    from kvrelay.cli.chat_run import chat as converse
    from kvrelay.cli.problems import EXIT_FAILED, report
    from kvrelay.client import GenerateOptions
    from kvrelay.errors import KVRelayError

    options = GenerateOptions(model=model, max_tokens=max_tokens, stop=stop or ())
    options |= drawing.options()
    try:
        code = converse(target, options, system, json_output)
    except KVRelayError as error:
        report(error, json_output)
        code = EXIT_FAILED
    raise typer.Exit(code)
