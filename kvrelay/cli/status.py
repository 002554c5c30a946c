"""`kvrelay status`: which workers there are and what they do."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from kvrelay.config import DEFAULT_TARGET

if TYPE_CHECKING:
    from kvrelay.client import Topology

EXAMPLE = ("kvrelay status --target 127.0.0.1:50061 --watch",)
WATCH_S = 1.0


def status(
    target: Annotated[str, typer.Option(envvar="KVRELAY_TARGET", help="Coordinator to ask.")] = DEFAULT_TARGET,
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Again every second until Ctrl-C.")] = False,
) -> None:
    """Show the workers of a cluster: blocks by state, sequences running and waiting, transfers, tokens per second."""
    import asyncio

    from kvrelay.cli.problems import EXIT_FAILED, EXIT_INTERRUPTED, report
    from kvrelay.errors import KVRelayError

    try:
        asyncio.run(_watch(target, json_output) if watch else _once(target, json_output))
    except KVRelayError as error:
        report(error, json_output)
        raise typer.Exit(EXIT_FAILED) from None
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None


async def _once(target: str, as_json: bool) -> None:
    from kvrelay.client import AsyncClient

    async with AsyncClient(target) as client:
        topology = await client.topology()
    if as_json:
        _print_json(topology)
        return
    from rich.console import Console

    from kvrelay.cli.status_view import topology_table

    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(topology_table(topology, console.width))


async def _watch(target: str, as_json: bool) -> None:
    """As JSON: one object a line."""
    import asyncio
    from contextlib import nullcontext

    from rich.live import Live

    from kvrelay.cli.status_view import topology_table
    from kvrelay.client import AsyncClient

    async with AsyncClient(target) as client:
        with nullcontext() if as_json else Live(auto_refresh=False) as live:
            while True:
                topology = await client.topology()
                if live is None:
                    _print_json(topology)
                else:
                    live.update(topology_table(topology, live.console.width), refresh=True)
                await asyncio.sleep(WATCH_S)


def _print_json(topology: Topology) -> None:
    import json

    print(json.dumps(topology, ensure_ascii=False), flush=True)
