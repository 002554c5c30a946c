"""`kvrelay bench`: load on a cluster and what came of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvrelay.config import DEFAULT_TARGET

if TYPE_CHECKING:
    from kvrelay.cli.bench_run import BenchOptions

EXAMPLE = (
    "kvrelay bench --requests 96 --concurrency 32",
    "kvrelay bench --rate 2 --prompt-tokens 1024",
    "kvrelay bench --scenario interference --long-prompt 1024 --plot interference.png",
)
SCENARIOS = ("load", "interference")


def bench(
    target: Annotated[str, typer.Option(envvar="KVRELAY_TARGET", help="Coordinator to load.")] = DEFAULT_TARGET,
    scenario: Annotated[
        str, typer.Option(help="load, or interference: streams with and without long prompts.")
    ] = "load",
    requests: Annotated[int, typer.Option(min=1, help="Requests in all.")] = 32,
    concurrency: Annotated[int, typer.Option(min=1, help="Closed loop: requests under way at any time.")] = 8,
    rate: Annotated[float | None, typer.Option(help="Open loop instead: requests a second, Poisson.")] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Random tokens of each prompt.")] = 128,
    output_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer; EOS is ignored.")] = 128,
    warmup: Annotated[int, typer.Option(min=0, help="Requests sent first and not counted.")] = 2,
    streams: Annotated[int, typer.Option(min=1, help="interference: decoding streams.")] = 8,
    long_prompt: Annotated[int, typer.Option(min=1, help="interference: tokens of a long prompt.")] = 1024,
    long_output: Annotated[int, typer.Option(min=1, help="interference: tokens of its answer.")] = 16,
    seconds: Annotated[float, typer.Option(min=0.1, help="interference: length of each phase.")] = 20.0,
    seed: Annotated[int, typer.Option(help="For the same prompts and arrivals again.")] = 0,
    json_file: Annotated[str, typer.Option("--json", metavar="FILE", help="Write figures as JSON; - is stdout.")] = "",
    plot: Annotated[str, typer.Option(metavar="FILE", help="interference: picture of all gaps.")] = "",
) -> None:
    """Measure time to first token (TTFT), time between tokens (TBT) and tokens per second.

    Prompts are random token ids, sampling is greedy. Exit code 1 when any request ended in an error.
    """
    if scenario not in SCENARIOS:
        raise typer.BadParameter(f"--scenario must be one of {', '.join(SCENARIOS)}, not {scenario!r}")
    if plot and scenario != "interference":
        raise typer.BadParameter("--plot needs --scenario interference")
    if rate is not None and not 0 < rate < float("inf"):
        raise typer.BadParameter("--rate must be more than 0")
    from kvrelay.cli.bench_interference import Interference
    from kvrelay.cli.bench_load import Workload
    from kvrelay.cli.bench_run import BenchOptions

    load = Workload(requests, prompt_tokens, output_tokens, concurrency, rate, seed)
    disturbed = Interference(streams, prompt_tokens, long_prompt, long_output, seconds, seed=seed)
    work = load if scenario == "load" else disturbed
    raise typer.Exit(_bench(BenchOptions(target, work, warmup, json_file, plot)))


def _bench(options: BenchOptions) -> int:
    import asyncio

    from kvrelay.cli.bench_run import run_bench
    from kvrelay.cli.problems import EXIT_FAILED, EXIT_INTERRUPTED, report
    from kvrelay.errors import KVRelayError
    from kvrelay.rpc.process import settle

    settle()  # a collection of ours would be taken for a late token of the server's
    try:
        return asyncio.run(run_bench(options))
    except KVRelayError as error:
        report(error, as_json=bool(options.json_file))
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
