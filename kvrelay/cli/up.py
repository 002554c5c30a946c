"""`kvrelay up`: a whole cluster on this machine until it is told to stop."""

from __future__ import annotations

from typing import Annotated

import typer

from kvrelay.config import PREEMPT, ROUTERS

EXAMPLE = ("kvrelay up --prefill 1 --decode 2 --model smollm2-135m-instruct",)


def up(
    prefill: Annotated[
        int | None, typer.Option(help="Prefill workers (default 1); 0: decode computes prompts.")
    ] = None,
    decode: Annotated[int | None, typer.Option(help="Decode workers (default 1).")] = None,
    listen: Annotated[str | None, typer.Option(help="HOST:PORT for clients (default 127.0.0.1:50061).")] = None,
    http: Annotated[str | None, typer.Option(help="HOST:PORT of OpenAI's HTTP API beside it (default: off).")] = None,
    model: Annotated[str | None, typer.Option(help="Model id or a Hugging Face directory.")] = None,
    dtype: Annotated[str | None, typer.Option(help="bfloat16 or float32.")] = None,
    executor: Annotated[str | None, typer.Option(help="torch, hash or scripted.")] = None,
    transport: Annotated[str | None, typer.Option(help="nixl or grpc.")] = None,
    attention: Annotated[str | None, typer.Option(help="auto, cpu or reference.")] = None,
    threads: Annotated[int | None, typer.Option(help="Compute threads of each worker (default 1).")] = None,
    pool_mb: Annotated[int | None, typer.Option(help="KV pool of each worker in MiB.")] = None,
    num_blocks: Annotated[int | None, typer.Option(help="KV pool of each worker in blocks.")] = None,
    block_size: Annotated[int | None, typer.Option(help="Token slots of a block.")] = None,
    step_tokens: Annotated[int | None, typer.Option(help="Most tokens of one forward pass.")] = None,
    max_sequences: Annotated[int | None, typer.Option(help="Most sequences of one batch.")] = None,
    local_prefill_below: Annotated[int | None, typer.Option(help="Shorter prompts are computed by decode.")] = None,
    max_attempts: Annotated[int | None, typer.Option(help="Attempts of a request that may be lost.")] = None,
    script: Annotated[str | None, typer.Option(help="Token ids for --executor scripted.")] = None,
    step_seconds: Annotated[float | None, typer.Option(help="hash, scripted: pretend a step takes this long.")] = None,
    token_seconds: Annotated[float | None, typer.Option(help="The same, for each token of a prompt.")] = None,
    drain_grace_s: Annotated[float | None, typer.Option(help="A worker's time to finish or move (default 8).")] = None,
    prefix_cache: Annotated[bool | None, typer.Option(help="Keep KV blocks for prompts that begin alike.")] = None,
    router: Annotated[str | None, typer.Option(help=f"How workers are chosen: {', '.join(ROUTERS)}.")] = None,
    preempt: Annotated[str | None, typer.Option(help=f"How decode makes room: {', '.join(PREEMPT)}.")] = None,
    swap_mb: Annotated[int | None, typer.Option(help="Decode's host memory for blocks put aside.")] = None,
    verify_kv: Annotated[bool | None, typer.Option(help="Check every KV block that decode gets.")] = None,
    trace_dir: Annotated[str | None, typer.Option(help="Write OTLP JSON traces into this folder.")] = None,
    otlp_endpoint: Annotated[str | None, typer.Option(help="Send traces to this OTLP gRPC endpoint.")] = None,
    trace_ratio: Annotated[float | None, typer.Option(help="Share of traces that is kept, 0 to 1.")] = None,
    trace_slow_s: Annotated[float | None, typer.Option(help="Keep traces with a longer wait all the same.")] = None,
    metrics: Annotated[
        str | None, typer.Option(help="HOST:PORT of Prometheus metrics; workers: ports after it.")
    ] = None,
    log_dir: Annotated[str | None, typer.Option(help="Write each process's log into this folder.")] = None,
    ready_timeout_s: Annotated[float | None, typer.Option(help="Longest start (default 120).")] = None,
    config: Annotated[str, typer.Option(envvar="KVRELAY_CONFIG", help="TOML file.")] = "",
) -> None:
    """Start a coordinator and workers on this machine and keep them running.

    Prints the line `ready HOST:PORT` on stdout once all of them serve, with --http also http://HOST:PORT on it. A
    process that dies, or is silent for 10 s, is started again. SIGINT or SIGTERM ends all of them, after their streams
    or --drain-grace-s, and exits 0; 1 means that the cluster could not serve, 78 that its configuration is wrong.
    """
    options = {key: value for key, value in locals().items() if key != "config"}
    raise typer.Exit(_up(options, config))


def _up(options: dict[str, object], config: str) -> int:
    import asyncio
    import os

    from kvrelay.cli.members import plan_local
    from kvrelay.cli.problems import EXIT_CONFIG, EXIT_FAILED, report
    from kvrelay.cli.screen import Screen
    from kvrelay.errors import KVRelayError, Unavailable

    try:
        plan = plan_local(options, path=config, env=os.environ, parent_pid=os.getpid())
    except KVRelayError as error:
        report(error)
        return EXIT_FAILED if isinstance(error, Unavailable) else EXIT_CONFIG
    from kvrelay.cli.serve import serve
    from kvrelay.cli.up_status import keep_up

    with Screen(plan.up.log_dir) as screen:
        screen.say(f"starting {len(plan.members)} processes on {plan.target}")
        return asyncio.run(serve(plan, screen, keep_up(plan, screen)))
