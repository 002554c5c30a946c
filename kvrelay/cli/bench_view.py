"""A benchmark's figures as a table for people."""

from __future__ import annotations

from typing import Any

from rich.table import Table

COLUMNS = ("p50", "p90", "p99", "max")
LABELS = {
    "requests": "requests",
    "errors": "errors",
    "wall_s": "seconds",
    "seconds": "seconds",
    "ttft_ms": "TTFT, ms",
    "tbt_ms": "TBT, ms",
    "output_tokens_per_s": "output tokens/s",
    "prompt_tokens_per_s": "prompt tokens/s",
    "exposed_hand_off_ms_p50": "exposed hand-off p50, ms",
    "exposed_hand_off_share_of_ttft_p50": "exposed hand-off p50, share of TTFT",
    "done": "answered",
    "p99_over_quiet_p50": "TBT p99 with long prompts / quiet p50",
}


def figures_table(figures: dict[str, Any]) -> Table:
    """One row a quantity; those with percentiles fill the last columns."""
    table = Table(title=_title(figures), title_justify="left", box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    for name in ("", *COLUMNS):
        table.add_column(name, justify="right", no_wrap=True)
    if "quiet" in figures:
        _add(table, figures["quiet"], "quiet: ")
        _add(table, figures["interfered"], "long prompts: ")
    _add(table, figures, "")
    return table


def _title(figures: dict[str, Any]) -> str:
    if "quiet" in figures:
        long = figures["long_prompt_tokens"]
        return f"{figures['model']}: {figures['streams']} decoding streams, {long}-token prompts arriving"
    loop = f"{figures['rate']} requests/s" if "rate" in figures else f"{figures['concurrency']} at a time"
    return f"{figures['model']}: {loop}, {figures['prompt_tokens']} tokens in, {figures['output_tokens']} out"


def _add(table: Table, figures: dict[str, Any], prefix: str) -> None:
    for key, value in figures.items():
        if key == "long_prompts":
            _add(table, value, prefix)
        elif key not in LABELS or value is None:
            continue
        elif isinstance(value, dict):
            table.add_row(prefix + LABELS[key], "", *(f"{value[name]:.1f}" for name in COLUMNS))
        else:
            table.add_row(prefix + LABELS[key], f"{value:g}")
