"""What a batch wastes that waits for its longest request, against one that lets go at every step. Pure arithmetic.

Rows are what a batch has room for at a time; one row computes one token of one request a step. Requests start in order.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Batching:
    """starts: the step, from 1, in which each request begins. useful: share of all rows of all steps that computed."""

    steps: int
    starts: tuple[int, ...]
    useful: float


def static_batching(lengths: Sequence[int], rows: int) -> Batching:
    """A batch of up to `rows` requests runs until its longest one ends; only then the next is taken."""
    steps, starts = 0, []
    for at in range(0, len(lengths), rows):
        batch = lengths[at : at + rows]
        starts += [steps + 1] * len(batch)
        steps += max(batch)
    return _batching(lengths, rows, steps, starts)


def continuous_batching(lengths: Sequence[int], rows: int) -> Batching:
    """A row that becomes free is taken by the next request in the very next step."""
    free_at, starts = [0] * min(rows, len(lengths)), []
    for length in lengths:
        begun = heapq.heappop(free_at)
        starts.append(begun + 1)
        heapq.heappush(free_at, begun + length)
    return _batching(lengths, rows, max(free_at, default=0), starts)


def spread_lengths(mean: float, count: int) -> tuple[int, ...]:
    """`count` lengths around a mean, as many short and few very long ones as answers have: exponential, its quantiles.

    Evenly mixed, the same every time.
    """
    lengths = [max(1, round(-mean * math.log(1 - (i + 0.5) / count))) for i in range(count)]
    step = next(s for s in range(count * 5 // 8, count + 1) if math.gcd(s, count) == 1) if count > 2 else 1
    return tuple(lengths[i * step % count] for i in range(count))


def _batching(lengths: Sequence[int], rows: int, steps: int, starts: Sequence[int]) -> Batching:
    return Batching(steps, tuple(starts), sum(lengths) / (rows * steps) if steps else 1.0)
