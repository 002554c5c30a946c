"""`kvrelay tbt`: why tokens came late, from recorded traces."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

EXAMPLE = (
    "kvrelay up --trace-dir traces     # and after some load:",
    "kvrelay tbt traces",
    "kvrelay tbt traces --plot late.png --request REQUEST_ID",
    "kvrelay tbt before --compare after",
)


def tbt(
    paths: Annotated[list[Path], typer.Argument(metavar="DIR|FILE...", help="OTLP JSON: folders are searched.")],
    top: Annotated[int, typer.Option(min=0, help="How many of the longest gaps to show.")] = 10,
    compare: Annotated[
        Path | None, typer.Option(metavar="DIR2", help="Another recording: both, and the differences.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Picture: a request over its worker's steps, gaps by cause.")
    ] = None,
    request: Annotated[
        str, typer.Option(metavar="ID", help="The request of --plot; default: the one with the longest gap.")
    ] = "",
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Show when tokens came, and why those that came late did.

    Reads OTLP JSON (.jsonl, .json) as --trace-dir or any exporter wrote it. TTFT is the time to the first token of a
    stream, TBT every gap between two of its tokens, both to the moment they were written to the client. Each gap is
    split into causes that add up to it. Needs about 300 bytes of memory a token. Exits 1 where nothing of KVRelay is
    found, and says on stderr what could not be read.
    """
    from kvrelay.cli.problems import EXIT_FAILED, EXIT_INTERRUPTED, report
    from kvrelay.errors import FailedPrecondition, KVRelayError

    if request and plot is None:
        raise typer.BadParameter("--request needs --plot")
    try:
        try:
            from kvrelay.tbt.run import Options, run
        except ImportError as error:
            if error.name != "numpy":
                raise
            raise FailedPrecondition("kvrelay tbt needs numpy: pip install 'kvrelay[plot]'") from None
        run(Options(tuple(paths), top, compare, plot, request, json_output))
    except KVRelayError as error:
        report(error, json_output)
        raise typer.Exit(EXIT_FAILED) from None
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None
