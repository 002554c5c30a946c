"""A benchmark's figures as a table for people."""

from __future__ import annotations

from typing import Any

from rich.table import Table

COLUMNS = ("p50", "p90", "p99", "max")


def figures_table(figures: dict[str, Any]) -> Table:
    """One row a quantity; those with percentiles fill the last columns."""
    table = Table(title=_title(figures), title_justify="left")
    table.add_column("")
    for name in ("value", *COLUMNS):
        table.add_column(name, justify="right")
    if "quiet" in figures:
        for name in ("quiet", "interfered"):
            _add(table, figures[name], f"{name}: ")
        table.add_row("p99 under load / quiet p50", str(figures["p99_over_quiet_p50"]))
    else:
        _add(table, figures, "")
    return table


def _title(figures: dict[str, Any]) -> str:
    if "quiet" in figures:
        return (
            f"{figures['model']}: {figures['streams']} streams, {figures['long_prompt_tokens']}-token prompts arriving"
        )
    loop = f"rate {figures['rate']}/s" if "rate" in figures else f"concurrency {figures['concurrency']}"
    return f"{figures['model']}: {loop}, {figures['prompt_tokens']} tokens in, {figures['output_tokens']} out"


def _add(table: Table, figures: dict[str, Any], prefix: str) -> None:
    for key, value in figures.items():
        if isinstance(value, dict) and "p50" in value:
            table.add_row(prefix + key, "", *(f"{value[name]:.1f}" for name in COLUMNS))
        elif key == "long_prompts":
            _add(table, value, prefix + "long prompts ")
        elif value is not None and not isinstance(value, (dict, str)) and not key.endswith("_tokens"):
            table.add_row(prefix + key, f"{value:g}")
