"""A report as tables for people. Knows rich, and no file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvrelay.gaps import CAUSES
from kvrelay.tbt.compare import Row

PERCENTILES = ("p50", "p90", "p99", "p99.9", "max")
NAMED_CAUSES = 3
"""Causes of a gap that its line names."""
SMALL = 0.02
"""Share of a gap below which a cause is not named."""


def report_view(report: Mapping[str, Any]) -> RenderableType:
    """The whole of it, one table below the other."""
    parts: list[RenderableType] = [Text(_recorded(report)), *_left_out(report), Text()]
    parts += [_latencies(report), Text(), _causes(report)]
    if report["worst"]:
        parts += [Text(), _worst(report["worst"])]
    return Group(*parts)


def compare_view(rows: Sequence[Row], a: str, b: str) -> RenderableType:
    table = _table("", "", "A", "B", "B - A", "change")
    for row in rows:
        table.add_row(
            row.name,
            row.unit,
            _number(row.a),
            _number(row.b),
            _number(row.difference, "+"),
            f"{row.change:+.1%}" if row.change is not None else "",
        )
    return Group(Text(f"A: {a}\nB: {b}\n"), table)


def _recorded(report: Mapping[str, Any]) -> str:
    return (
        f"{report['requests']:,} requests, {report['tokens']:,} tokens, {report['gaps']:,} gaps, "
        f"{report['steps']:,} steps in {report['files']} files"
    )


def _left_out(report: Mapping[str, Any]) -> Iterator[Text]:
    left = {name: count for name, count in report["left_out"].items() if count and name != "other_spans"}
    if left:
        yield Text("left out or incomplete: " + ", ".join(f"{n.replace('_', ' ')} {c:,}" for n, c in left.items()))


def _latencies(report: Mapping[str, Any]) -> Table:
    table = _table("ms", "worker", "count", *PERCENTILES)
    who = [("all", report["overall"]), *((row["worker"], row) for row in report["workers"])]
    for label, key, count in (("TTFT", "ttft_ms", "streams"), ("TBT", "tbt_ms", "gaps")):
        said = False
        for worker, row in who:
            if row[key] is not None:
                figures = (f"{row[key][name]:.2f}" for name in PERCENTILES)
                table.add_row("" if said else label, worker, f"{row[count]:,}", *figures)
                said = True
    return table


def _causes(report: Mapping[str, Any]) -> Table:
    """By what they cost in all; causes of nothing are left out."""
    causes, slowest = report["causes"], report["slowest"]
    since = f" (from {slowest['from_ms']:.2f} ms)" if slowest["from_ms"] is not None else ""
    table = _table("where the time of gaps went", "seconds", "share", f"slowest 1 %{since}")
    for cause in sorted((c.value for c in CAUSES), key=lambda name: -causes["seconds"][name]):
        if causes["seconds"][cause]:
            shares = (f"{causes['shares'][cause]:.1%}", f"{slowest['shares'][cause]:.1%}")
            table.add_row(cause, f"{causes['seconds'][cause]:.3f}", *shares)
    return table


def _worst(worst: Sequence[Mapping[str, Any]]) -> Table:
    title = Text("the longest gaps, of those that one step ended only the longest")
    table = Table(title=title, title_justify="left", title_style="", box=None, pad_edge=False)
    table.add_column("gap, ms", justify="right", no_wrap=True)
    for name in ("request", "token", "at, s", "worker"):
        table.add_column(name, justify="left" if name in {"request", "worker"} else "right", no_wrap=True)
    table.add_column("causes, ms")
    table.add_column("the step that ended it")
    for gap in worst:
        sequence = f".{gap['sequence']}" if gap["sequence"] else ""
        table.add_row(
            f"{gap['gap_ms']:.2f}",
            gap["request_id"] + sequence,
            str(gap["token"]),
            f"{gap['at_s']:.3f}",
            gap["worker"],
            causes_line(gap),
            step_line(gap),
        )
    return table


def causes_line(gap: Mapping[str, Any]) -> str:
    """The biggest causes of a gap, those that are worth a word."""
    worth = [(name, ms) for name, ms in gap["causes_ms"].items() if ms >= SMALL * gap["gap_ms"]]
    return ", ".join(f"{name} {ms:.2f}" for name, ms in worth[:NAMED_CAUSES])


def step_line(gap: Mapping[str, Any]) -> str:
    """What the batch was doing: of what was nothing, nothing is said."""
    step = gap["step"]
    if step is None:
        return f"step {gap['step_id']}, not recorded" if gap["step_id"] else "none: prefill sampled the token"
    words = [f"step {step['id']}: {step['ms']:.2f} ms, batch {step['batch']}"]
    if step["prefill_tokens"]:
        words.append(f"{step['prefill_tokens']} prompt tokens")
    if step["transfers"]:
        words.append(f"{step['transfers']} transfers")
    if preempted := step["preemptions"] + step["preemptions_meanwhile"]:
        words.append(f"{preempted} preempted")
    if swapped := step["swapped_blocks"] + step["swapped_blocks_meanwhile"]:
        words.append(f"{swapped} blocks swapped")
    if step["steps_without_it"]:
        words.append(f"{step['steps_without_it']} steps without it")
    if gap["streams"] > 1:
        words.append(f"{gap['streams']} streams waited")
    return ", ".join(words)


def _table(*headers: str) -> Table:
    """The first two columns are words."""
    table = Table(box=None, pad_edge=False)
    for number, header in enumerate(headers):
        words = number == 0 or (number == 1 and header in {"worker", ""})
        table.add_column(header, justify="left" if words else "right", no_wrap=True)
    return table


def _number(value: float | None, sign: str = "") -> str:
    if value is None:
        return "-"
    return f"{value:{sign},}" if isinstance(value, int) else f"{value:{sign}.3f}"
