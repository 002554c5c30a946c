"""Counts in buckets, for what is measured too often for a metrics library: a sorted list of values is counted at once.

Standard library only.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence


class Buckets:
    """Values up to and with each bound, and those above the last; their sum."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def add_sorted(self, values: Sequence[float]) -> None:
        """Ascending values."""
        before = 0
        for i, bound in enumerate(self.bounds):
            upto = bisect_right(values, bound, before)
            self.counts[i] += upto - before
            before = upto
            if before == len(values):
                break
        self.counts[-1] += len(values) - before
        self.sum += sum(values)

    def cumulative(self) -> list[tuple[str, float]]:
        """As Prometheus wants them: ("0.001", values up to it), ..., ("+Inf", all)."""
        out, total = [], 0
        for bound, count in zip([*map(str, self.bounds), "+Inf"], self.counts, strict=True):
            total += count
            out.append((bound, float(total)))
        return out
