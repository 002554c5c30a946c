"""Runs a benchmark against a cluster and shows the figures: the edge around the pure parts of bench_*."""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvrelay.cli.bench_interference import Interference, Phase, compare, measure
from kvrelay.cli.bench_load import Prompt, Runner, Workload, random_prompts, run_load
from kvrelay.cli.bench_plot import plot_interference
from kvrelay.cli.bench_stats import Sample, describe
from kvrelay.cli.problems import EXIT_FAILED, error_code
from kvrelay.client import AsyncClient, ModelInfo
from kvrelay.errors import FailedPrecondition, InvalidArgument, KVRelayError

TICK_S = 0.1
LONG_PROMPT_SEED = 1 << 20
"""Long prompts are drawn from seeds of their own, so that none is equal to a stream's."""


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """json_file: "" prints a table, - prints JSON, else a file. warmup: requests sent first and not counted."""

    target: str
    work: Workload | Interference
    warmup: int = 2
    json_file: str = ""
    plot: str = ""


async def run_bench(options: BenchOptions) -> int:
    """Exit code: 1 when any request ended in an error."""
    async with AsyncClient(options.target) as client:
        model = await client.get_model()
        run = client_runner(client)
        work = options.work
        await _warm_up(options, model, run)
        with _no_garbage_collection():
            if isinstance(work, Workload):
                figures = await _load(work, model, run)
            else:
                figures = await _interference(work, model, run, options.plot)
    _show({"model": model.model_id, **figures}, options.json_file)
    return EXIT_FAILED if failed(figures) else 0


def client_runner(client: AsyncClient) -> Runner:
    """Runs one request: greedy, past EOS. Between two tokens it only looks at the clock."""

    async def run(sample: Sample, prompt: Prompt, output_tokens: int) -> None:
        stream = client.generate(prompt, max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
        append, clock = sample.tokens_at_s.append, time.perf_counter
        try:
            async for _ in stream:
                append(clock())
        except KVRelayError as error:
            sample.error, sample.message = error_code(error), error.message
            return
        hand_off = stream.result.hand_off
        sample.exposed_s = hand_off.exposed_s if hand_off else None

    return run


def failed(figures: dict[str, Any]) -> bool:
    """Whether any request in any phase ended in an error."""
    parts = (figures, figures.get("quiet", {}), figures.get("interfered", {}))
    return any(part.get("errors", 0) for part in parts)


async def _warm_up(options: BenchOptions, model: ModelInfo, run: Runner) -> None:
    if not options.warmup:
        return
    length = options.work.prompt_tokens
    prompts = random_prompts(options.warmup, length, model.vocab_size, options.work.seed - 1)
    samples, _ = await run_load(Workload(options.warmup, length, 8, options.warmup), prompts, run, lambda: None)
    if all(sample.error for sample in samples):
        raise FailedPrecondition(f"no request succeeds: {samples[0].error}: {samples[0].message}")


async def _load(work: Workload, model: ModelInfo, run: Runner) -> dict[str, Any]:
    prompts = random_prompts(work.requests, work.prompt_tokens, model.vocab_size, work.seed)
    with _progress("requests", work.requests) as advance:
        samples, wall_s = await run_load(work, prompts, run, lambda: advance(1.0))
    loop = {"rate": work.rate} if work.rate is not None else {"concurrency": work.concurrency}
    sizes = {"prompt_tokens": work.prompt_tokens, "output_tokens": work.output_tokens}
    return {"scenario": "load", **loop, **sizes, **describe(samples, wall_s)}


async def _interference(work: Interference, model: ModelInfo, run: Runner, plot: str) -> dict[str, Any]:
    room = model.context_limit - work.prompt_tokens
    if room < 1 or work.long_prompt + work.long_output > model.context_limit:
        raise InvalidArgument(f"prompts do not fit the context of {model.context_limit} tokens", field="long_prompt")
    work = replace(work, stream_tokens=min(work.stream_tokens, room))
    prompts = random_prompts(work.streams, work.prompt_tokens, model.vocab_size, work.seed)
    phases: list[Phase] = []
    for label, long_prompts in (("quiet", None), ("with long prompts", _long_prompts(work, model))):
        with _progress(label, work.seconds) as advance:
            phases.append(await measure(work, prompts, long_prompts, run, lambda advance=advance: advance(TICK_S)))  # type: ignore[misc]  # typeshed: default binds the loop variable
    quiet, busy = phases
    if plot:
        title = f"{model.model_id}: {work.streams} streams, quiet and while {work.long_prompt}-token prompts arrive"
        plot_interference(plot, title, quiet.gaps("quiet"), busy.gaps("prompts arriving"))
    return compare(work, quiet, busy)


def _long_prompts(work: Interference, model: ModelInfo) -> Iterator[Prompt]:
    seed = work.seed + LONG_PROMPT_SEED
    while True:
        yield from random_prompts(1, work.long_prompt, model.vocab_size, seed)
        seed += 1


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A collection would look like a late token."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


@contextmanager
def _progress(what: str, total: float) -> Iterator[Callable[[float], None]]:
    """A bar on stderr when that is a terminal, else nothing."""
    if not sys.stderr.isatty():
        yield lambda step: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True, refresh_per_second=4) as bar:
        task = bar.add_task(what, total=total)
        yield lambda step: bar.advance(task, step)


def _show(figures: dict[str, Any], json_file: str) -> None:
    text = json.dumps(figures, indent=2)
    if json_file == "-":
        print(text)
        return
    if json_file:
        Path(json_file).write_text(text + "\n", encoding="utf-8")
    from rich.console import Console

    from kvrelay.cli.bench_view import figures_table

    Console().print(figures_table(figures))
    if figures.get("first_error"):
        print(f"kvrelay: first error: {figures['first_error']}", file=sys.stderr)
