"""`kvrelay doctor`: is this machine, its configuration, and a running cluster as they should be; what to do if not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kvrelay.doctor.finding import Finding

EXAMPLE = (
    "kvrelay doctor",
    "kvrelay doctor --config kvrelay.toml --json",
    "kvrelay doctor --target 127.0.0.1:50061",
)
STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}


def doctor(
    target: Annotated[
        str, typer.Option(envvar="KVRELAY_TARGET", metavar="HOST:PORT", help="Look at this coordinator's cluster too.")
    ] = "",
    config: Annotated[str, typer.Option(envvar="KVRELAY_CONFIG", help="TOML file to look at.")] = "",
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object on stdout, at the end.")] = False,
) -> None:
    """Check and measure this machine, in less than 20 seconds: one line a check, with what is wrong and what to do.

    Looks at Python, cores, threads, memory, kernels, GPUs, configuration, model and port; measures memory bandwidth and
    how fast blocks move between two processes, over which path. Measure when nothing else runs. With --target the
    cluster is looked at as well: silent, draining or mixed workers, round trips, caches. Exits 1 if something is a
    problem, 0 if not.
    """
    if target:
        _require_address(target)
    from kvrelay.cli.problems import EXIT_FAILED, EXIT_INTERRUPTED
    from kvrelay.doctor.finding import Verdict, worst

    try:
        findings = list(_shown(target, config, json_output))
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None
    verdict = worst(findings)
    if json_output:
        _print_json(verdict, findings)
    else:
        counts = ", ".join(f"{sum(f.verdict is v for f in findings)} {v}" for v in Verdict)
        print(f"\n{len(findings)} checks: {counts}")
    raise typer.Exit(EXIT_FAILED if verdict is Verdict.PROBLEM else 0)


def _shown(target: str, config: str, quiet: bool) -> Iterator[Finding]:
    """Each finding as it comes, printed unless quiet; what is being done stands on a terminal's last line."""
    from rich.console import Console

    from kvrelay.cli.doctor_run import examine

    progress = Console(stderr=True)
    with progress.status("looking at this host") as status:
        for finding in examine(target, config, status.update):
            if not quiet:
                status.stop()
                _print_line(finding)
                status.start()
            yield finding


def _print_line(finding: Finding) -> None:
    """The verdict, the check, what is so; below it what to do."""
    from rich.console import Console
    from rich.text import Text

    line = Text.assemble((f"{finding.verdict:<8}", STYLES[finding.verdict]), f" {finding.check:<12} {finding.what}")
    if finding.advice:
        line.append(f"\n{'':<8} {'':<12} -> {finding.advice}")
    Console(soft_wrap=True).print(line)


def _print_json(verdict: str, findings: list[Finding]) -> None:
    import json
    from dataclasses import asdict

    print(json.dumps({"verdict": verdict, "findings": [asdict(f) for f in findings]}, ensure_ascii=False))


def _require_address(target: str) -> None:
    from kvrelay.config_load import parse_address

    try:
        parse_address(target)
    except ValueError as error:
        raise typer.BadParameter(f"--target {error}") from None
