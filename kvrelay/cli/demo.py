"""`kvrelay demo`: a whole cluster, one real prompt, and what its answer cost."""

from __future__ import annotations

from typing import Annotated

import typer

EXAMPLE = ("kvrelay demo --prompt-file my_question.txt --max-tokens 64",)
PROMPT_FILE = "examples/prompt_1000.txt"


def demo(
    prompt_file: Annotated[str, typer.Option(metavar="FILE", help="Text to answer.")] = PROMPT_FILE,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of the answer.")] = 96,
    transport: Annotated[str | None, typer.Option(help="nixl or grpc.")] = None,
    model: Annotated[str | None, typer.Option(help="Model id or a Hugging Face directory.")] = None,
) -> None:
    """Start a coordinator, a prefill and a decode worker, answer one long prompt, show what it cost, end them."""
    raise typer.Exit(_demo({"transport": transport, "model": model, "listen": "127.0.0.1:0"}, prompt_file, max_tokens))


def _demo(options: dict[str, object], prompt_file: str, max_tokens: int) -> int:
    from kvrelay.cli.demo_run import run_demo
    from kvrelay.cli.problems import EXIT_CONFIG, EXIT_FAILED, report
    from kvrelay.errors import KVRelayError, Unavailable

    try:
        return run_demo(options, prompt_file, max_tokens)
    except KVRelayError as error:
        report(error)
        return EXIT_FAILED if isinstance(error, Unavailable) else EXIT_CONFIG
