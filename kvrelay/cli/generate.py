"""`kvrelay generate`: one answer, from a cluster or, with --local, from this process alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from kvrelay.cli.generate_flags import ConstraintFlags, EndingFlags, EngineFlags, OutputFlags, PromptFlags
from kvrelay.cli.sampling_flags import SamplingFlags
from kvrelay.config import DEFAULT_TARGET

if TYPE_CHECKING:
    from kvrelay.cli.ask import Ask

EXAMPLE = (
    "echo 'Why is the sea salty?' | kvrelay generate --chat --max-tokens 64 -",
    "kvrelay generate --chat --json-schema examples/person.schema.json 'A sailor.'",
)
Priority = Literal["batch", "normal", "interactive"]


def generate(
    prompt: Annotated[str | None, typer.Argument(help="The prompt; - reads it from stdin.")] = None,
    target: Annotated[str, typer.Option(envvar="KVRELAY_TARGET", help="Coordinator to ask.")] = DEFAULT_TARGET,
    model: Annotated[str, typer.Option(help="Model id; with --local also a directory.")] = "",
    n: Annotated[int, typer.Option("-n", "--n", help="Answers to the one prompt, each printed when complete.")] = 1,
    priority: Annotated[Priority | None, typer.Option(help="Who goes first where not all can.")] = None,
    deadline: Annotated[float | None, typer.Option(metavar="SECONDS", help="Give up after this long.")] = None,
    local: Annotated[bool, typer.Option("--local", help="Answer in this process, without any split.")] = False,
    *,
    prompts: PromptFlags,
    drawing: SamplingFlags,
    ending: EndingFlags,
    constraint: ConstraintFlags,
    output: OutputFlags,
    engine: EngineFlags,
) -> None:
    """Generate text and stream it to stdout. With -n each answer is written as it ends, its number before it on stderr.

    Exit code 1 for an error (one line on stderr, with --json one object {"error": {code, message, field}}), 2 for
    wrong usage, 130 after Ctrl-C, which cancels the request.
    """
    _check_usage(prompt, prompts, local, deadline, engine)
    if output.logprobs is not None and not output.json_output:
        raise typer.BadParameter("--logprobs needs --json: text has no room for them")
    if deadline is not None and not deadline > 0:
        raise typer.BadParameter(f"--deadline must be above 0, not {deadline:g}")
    from kvrelay.cli.ask import answer, ask_cluster
    from kvrelay.cli.problems import EXIT_FAILED, report
    from kvrelay.client import GenerateOptions
    from kvrelay.errors import KVRelayError

    options = GenerateOptions(n=n if n != 1 else None, priority=priority)
    options |= {**prompts.options(), **drawing.options(), **ending.options(), **output.options()}
    try:
        options |= constraint.options()
    except KVRelayError as error:
        report(error, output.json_output)
        raise typer.Exit(EXIT_FAILED) from None
    ask: Ask
    if local:
        from kvrelay.cli.local import ask_local

        ask = ask_local(engine.settings | {"model": model or None}, options)
    else:
        options |= {"model": model, "deadline_s": deadline}
        ask = ask_cluster(target, options)
    raise typer.Exit(answer(ask, prompt, prompts.tokens, prompts.chat, output.json_output, n))


def _check_usage(
    prompt: str | None, prompts: PromptFlags, local: bool, deadline: float | None, engine: EngineFlags
) -> None:
    if (prompt is None) == (not prompts.tokens):
        raise typer.BadParameter("give either PROMPT or --tokens FILE")
    given = [key for key, value in engine.settings.items() if value is not None]
    if given and not local:
        raise typer.BadParameter(f"--{given[0].replace('_', '-')} needs --local: a cluster was started with its own")
    if local and deadline is not None:
        raise typer.BadParameter("--deadline is for a cluster, not for --local")
