"""A plan as tables for people and as one object for programs. Works nothing out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from kvrelay.planning import ChunkStep, Plan

SHOWN_CHUNKS = 4
"""Of a long list of chunks: so many from its beginning, and the last one."""


def plan_object(plan: Plan) -> dict[str, Any]:
    """Every value of the plan, and those that follow from others. Units are in the names; times in seconds."""
    made = asdict(plan)
    for row, step in zip(made["steps"], plan.steps, strict=True):
        row |= {"seconds": step.seconds, "bound_by": step.bound_by, "tokens_per_s": step.tokens_per_s}
    made["long_prompt"]["cost"]["total"] = plan.long_prompt.cost.total
    made["workers"]["prefill_per_decode"] = plan.workers.prefill_per_decode
    return made


def plan_tables(name: str, plan: Plan) -> Iterator[Table]:
    """Pool, steps, the long prompt and its chunks, the load: in the order in which one follows from another."""
    yield _figures(f"{name} on {_machine(plan)}", _model_rows(plan))
    yield _steps(plan)
    yield _figures(f"A prompt of {plan.long_prompt.num_tokens:,} tokens", _prompt_rows(plan))
    yield _chunks("Its chunks on a prefill worker", plan.long_prompt.chunks, 0)
    yield _chunks("If it shared a batch with decoding", plan.long_prompt.mixed, plan.long_prompt.decode_sequences)
    yield _figures(_load_title(plan), _load_rows(plan))


def _machine(plan: Plan) -> str:
    machine = plan.machine
    rates = f"{machine.bytes_per_s / 1e9:g} GB/s, {machine.flops_per_s / 1e12:g} TFLOP/s"
    return f"{machine.memory_bytes / 1e9:g} GB, {rates}, network {machine.network_bytes_per_s / 1e9:g} GB/s"


def _model_rows(plan: Plan) -> Iterator[tuple[str, str]]:
    model, pool, terms = plan.model, plan.pool, plan.terms
    yield "weights", f"{model.weight_bytes / 1e9:.2f} GB, {model.num_params / 1e9:.3g}e9 parameters in {terms.dtype}"
    yield "KV", f"{model.token_bytes:,} bytes a token, {model.token_bytes * terms.block_size:,} a block"
    room = f"{terms.usable:.0%} usable, less weights, less {terms.reserve_bytes / 1e9:g} GB"
    yield "pool", f"{pool.num_bytes / 1e9:.2f} GB ({room})"
    yield "", f"{pool.num_tokens:,} tokens, {pool.num_blocks:,} blocks of {terms.block_size}"
    yield f"requests of {pool.mean_tokens:g} tokens", f"{pool.paged.num_requests:,} fit, {pool.paged.wasted:.2%} wasted"
    longest = f"if each had {model.max_positions:,} tokens of its own"
    yield "", f"{pool.preallocated.num_requests:,} would fit {longest}, {pool.preallocated.wasted:.1%} wasted"


def _steps(plan: Plan) -> Table:
    table = _table(f"Bounds of a decode step, {plan.pool.mean_tokens:g} tokens of context each")
    for column in ("sequences", "reads GB", "ms", "bound by", "tokens/s"):
        table.add_column(column, justify="right")
    for step in plan.steps:
        cells = f"{step.bytes_read / 1e9:.2f}", f"{step.seconds * 1e3:.2f}", step.bound_by, f"{step.tokens_per_s:,.0f}"
        table.add_row(f"{step.num_sequences:,}", *cells)
    return table


def _prompt_rows(plan: Plan) -> Iterator[tuple[str, str]]:
    long, cost = plan.long_prompt, plan.long_prompt.cost
    yield "operations", f"{cost.linear:.3e} (weights) + {cost.attention:.3e} (attention) = {cost.total:.3e}"
    at = f"{_time(long.real_s)} at {plan.terms.efficiency:.0%}"
    yield "in one piece", f"{_time(long.seconds)} at peak, {at}"
    steps = f"{long.stalled_steps:,.0f} to {long.real_stalled_steps:,.0f} of their steps"
    yield f"{long.decode_sequences} that decode beside it wait", f"{steps}; on a prefill worker there are none"
    moved = f"{long.handoff_bytes / 1e9:.3g} GB in {long.handoff_blocks:,} blocks"
    yield "hand-off", f"{moved}, {_time(long.handoff_s)}; all but its last chunk while later ones compute"


def _chunks(title: str, chunks: Sequence[ChunkStep], rows: int) -> Table:
    beside = f" with {rows} decode rows" if rows else ""
    table = _table(f"{title}: {len(chunks)} steps{beside}")
    for column in ("chunk", "after", "tokens", "weights", "attention", "ms at peak", "ms of the step"):
        table.add_column(column, justify="right")
    for number, chunk in enumerate(chunks):
        last = number == len(chunks) - 1
        if number == SHOWN_CHUNKS and not last:
            table.add_row("...")
        if number >= SHOWN_CHUNKS and not last:
            continue
        work = (
            f"{chunk.linear:.3e}",
            f"{chunk.attention:.3e}",
            f"{chunk.seconds * 1e3:.1f}",
            f"{chunk.step_s * 1e3:.1f}",
        )
        table.add_row(str(number + 1), f"{chunk.past_tokens:,}", f"{chunk.num_tokens:,}", *work)
    return table


def _load_title(plan: Plan) -> str:
    load = plan.load
    requests = f"{load.rate:g} requests/s, {load.prompt_tokens:,} tokens in, {load.output_tokens:,} out"
    return f"{requests}, at {plan.terms.efficiency:.0%} of peak"


def _load_rows(plan: Plan) -> Iterator[tuple[str, str]]:
    workers = plan.workers
    yield (
        "prefill workers",
        f"{workers.num_prefill} ({workers.prefill:.3g} busy); a prompt {_time(workers.prompt_s)}",
    )
    yield "decode workers", f"{workers.num_decode} ({workers.decode:.3g} busy with batches of {workers.full_batch})"
    yield "prefill for one decode", f"{workers.prefill_per_decode:.3g}"
    yield "each decode worker runs", f"{workers.batch:.1f} sequences, TBT {_time(workers.tbt_s)}"
    yield "hand-off", f"{_time(workers.handoff_s)} a prompt, {workers.network:.1%} of a decode worker's network"
    static = f"{plan.static:.0%} if batches waited for their longest answer, {plan.continuous:.0%} as they do not"
    yield "rows that compute", static


def _time(seconds: float) -> str:
    """Three digits with a unit."""
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def _figures(title: str, rows: Iterator[tuple[str, str]]) -> Table:
    table = _table(title)
    table.show_header = False
    table.add_column("", no_wrap=True)
    table.add_column("")
    for row in rows:
        table.add_row(*row)
    return table


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, min_width=len(title))
