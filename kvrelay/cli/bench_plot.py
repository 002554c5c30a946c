"""The picture of the interference scenario: every gap of the decoding streams, quiet and under arriving prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvrelay.cli.bench_stats import percentile
from kvrelay.errors import FailedPrecondition

if TYPE_CHECKING:
    from matplotlib.axes import Axes

QUIET, BUSY = "#4878a8", "#d1603d"


@dataclass(frozen=True, slots=True)
class Gaps:
    """Gaps of all streams of one phase: (seconds since its start, gap in ms), and when long prompts were sent."""

    label: str
    points: tuple[tuple[float, float], ...]
    arrivals_s: tuple[float, ...] = ()


def plot_interference(path: str, title: str, quiet: Gaps, busy: Gaps) -> None:
    """Write a PNG, SVG or PDF, by the ending of `path`. FailedPrecondition where matplotlib is missing."""
    try:
        import matplotlib as mpl
    except ImportError:
        raise FailedPrecondition("--plot needs matplotlib: pip install 'kvrelay[plot]'", field="plot") from None
    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import LogFormatter, ScalarFormatter

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), width_ratios=(3, 2), layout="constrained")
    for gaps, color in ((busy, BUSY), (quiet, QUIET)):
        _over_time(left, gaps, color)
        _distribution(right, gaps, color)
    for at_s in busy.arrivals_s:
        left.axvline(at_s, color=BUSY, alpha=0.25, linewidth=0.8)
    _label(left, "seconds", "time between two tokens, ms")
    _label(right, "time between two tokens, ms", "share of gaps that are longer")
    left.set_yscale("log")
    right.set_xscale("log")
    right.set_yscale("log")
    for axis in (left.yaxis, right.xaxis):  # 20, 30, 50 rather than powers of ten
        axis.set_major_formatter(ScalarFormatter())
        axis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))
    right.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    figure.suptitle(title)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise FailedPrecondition(f"cannot write {path}: {error}", field="plot") from error
    finally:
        plt.close(figure)


def survival(values: Sequence[float]) -> tuple[list[float], list[float]]:
    """(ordered values, share of all values that are at least as long)."""
    ordered = sorted(values)
    return ordered, [1.0 - index / len(ordered) for index in range(len(ordered))]


def _over_time(axes: Axes, gaps: Gaps, color: str) -> None:
    times, values = zip(*gaps.points, strict=True) if gaps.points else ((), ())
    axes.scatter(times, values, s=3, color=color, alpha=0.4, linewidths=0)


def _distribution(axes: Axes, gaps: Gaps, color: str) -> None:
    values = [value for _, value in gaps.points]
    if not values:
        return
    label = f"{gaps.label}: p50 {percentile(values, 50):.0f}, p99 {percentile(values, 99):.0f} ms"
    axes.step(*survival(values), color=color, label=label, where="post")


def _label(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.2)
