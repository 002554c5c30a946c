"""`kvrelay drain WORKER`: send one worker away in good order, and see it come back where a supervisor restarts it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvrelay.config import DEFAULT_TARGET

if TYPE_CHECKING:
    from kvrelay.cli.drain_run import Progress

EXAMPLE = ("kvrelay drain decode-0 --grace-s 30",)


def drain(
    worker: Annotated[str, typer.Argument(help="The worker's id, as `kvrelay status` shows it.")],
    grace_s: Annotated[float, typer.Option(min=0, help="Seconds for what it has to end; then the rest moves.")] = 30.0,
    target: Annotated[str, typer.Option(envvar="KVRELAY_TARGET", help="Coordinator to ask.")] = DEFAULT_TARGET,
    wait: Annotated[bool, typer.Option(help="Wait until the worker has gone.")] = True,
    back_s: Annotated[float, typer.Option(min=0, help="Then wait so long for it to come back.")] = 30.0,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object on stdout, at the end.")] = False,
) -> None:
    """Let a worker go: it takes nothing new, finishes or moves what it has, and ends.

    No request fails as long as another worker of its role can take what is moved, or its successor comes soon. Where
    something starts the worker again, as `kvrelay up` does, draining one worker after the other is a rolling restart.
    Exits 0 once it has gone, whether or not it came back; 1 if there is no such worker, or it stays.
    """
    import asyncio

    from kvrelay.cli.drain_run import run
    from kvrelay.cli.problems import EXIT_FAILED, EXIT_INTERRUPTED, report
    from kvrelay.errors import KVRelayError

    try:
        progress = asyncio.run(run(target, worker, grace_s, wait, back_s, _silent if json_output else _say))
    except KVRelayError as error:
        report(error, json_output)
        raise typer.Exit(EXIT_FAILED) from None
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None
    if json_output:
        _print_json(progress)


def _say(line: str) -> None:
    print(line, flush=True)


def _silent(line: str) -> None:
    pass


def _print_json(progress: Progress) -> None:
    import json
    from dataclasses import asdict

    print(json.dumps(asdict(progress), ensure_ascii=False), flush=True)
