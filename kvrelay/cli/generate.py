"""`kvrelay generate`: one answer, from a cluster or, with --local, from this process alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import typer

from kvrelay.config import DEFAULT_TARGET, DTYPES, EXECUTORS

EXAMPLE = "Example: echo 'Why is the sea salty?' | kvrelay generate --chat --max-tokens 64 -"


def generate(
    prompt: Annotated[str | None, typer.Argument(help="The prompt; - reads it from stdin.")] = None,
    target: Annotated[str, typer.Option(envvar="KVRELAY_TARGET", help="Coordinator to ask.")] = DEFAULT_TARGET,
    tokens: Annotated[str, typer.Option(metavar="FILE", help="Prompt as token ids: a JSON list or numbers.")] = "",
    chat: Annotated[bool, typer.Option("--chat", help="Apply the model's chat template.")] = False,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of the answer.")] = 128,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy (default 1).")] = None,
    top_p: Annotated[float | None, typer.Option(help="Smallest set of tokens with this probability.")] = None,
    top_k: Annotated[int | None, typer.Option(help="The k likeliest tokens; 0 is off.")] = None,
    seed: Annotated[int | None, typer.Option(help="For the same answer again.")] = None,
    n: Annotated[int, typer.Option("-n", "--n", help="Answers to the one prompt, each printed when complete.")] = 1,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be repeated.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end of the text.")] = False,
    no_prefix_cache: Annotated[
        bool, typer.Option("--no-prefix-cache", help="Neither use nor fill caches of prompts.")
    ] = False,
    deadline: Annotated[float | None, typer.Option(metavar="SECONDS", help="Give up after this long.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object at the end, no streaming.")] = False,
    local: Annotated[bool, typer.Option("--local", help="Answer in this process, without any split.")] = False,
    model: Annotated[str, typer.Option(help="Model id; with --local also a directory.")] = "",
    dtype: Annotated[str | None, typer.Option(help=f"With --local: {' or '.join(DTYPES)}.")] = None,
    executor: Annotated[str | None, typer.Option(help=f"With --local: {', '.join(EXECUTORS)}.")] = None,
    threads: Annotated[int | None, typer.Option(help="With --local: compute threads.")] = None,
    num_blocks: Annotated[int | None, typer.Option(help="With --local: blocks of the KV pool.")] = None,
    block_size: Annotated[int | None, typer.Option(help="With --local: token slots of a block.")] = None,
    step_tokens: Annotated[int | None, typer.Option(help="With --local: most tokens of one forward pass.")] = None,
    attention: Annotated[str | None, typer.Option(help="With --local: auto, cpu or reference.")] = None,
    script: Annotated[str | None, typer.Option(help="With --local --executor scripted: its token ids.")] = None,
) -> None:
    """Generate text and stream it to stdout. With -n each answer is written as it ends, its number before it on stderr.

    Exit code 1 for an error (one line on stderr, with --json one object {"error": {code, message, field}}), 2 for
    wrong usage, 130 after Ctrl-C, which cancels the request.
    """
    engine = {"dtype": dtype, "executor": executor, "threads": threads, "num_blocks": num_blocks, "script": script}
    engine |= {"block_size": block_size, "step_tokens": step_tokens, "attention": attention}
    _check_usage(prompt, tokens, local, deadline, engine)
    from kvrelay.cli.ask import answer, ask_cluster
    from kvrelay.client import GenerateOptions

    options = GenerateOptions(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        stop=stop or (),
        ignore_eos=ignore_eos,
        n=n if n != 1 else None,
        prefix_cache=False if no_prefix_cache else None,
    )
    if local:
        from kvrelay.cli.local import ask_local

        ask = ask_local(engine | {"model": model or None}, options)
    else:
        options |= {"model": model, "deadline_s": deadline}
        ask = ask_cluster(target, options)
    raise typer.Exit(answer(ask, prompt, tokens, chat, json_output, n))


def _check_usage(
    prompt: str | None, tokens: str, local: bool, deadline: float | None, engine: Mapping[str, object]
) -> None:
    if (prompt is None) == (not tokens):
        raise typer.BadParameter("give either PROMPT or --tokens FILE")
    given = [key for key, value in engine.items() if value is not None]
    if given and not local:
        raise typer.BadParameter(f"--{given[0].replace('_', '-')} needs --local: a cluster was started with its own")
    if local and deadline is not None:
        raise typer.BadParameter("--deadline is for a cluster, not for --local")
