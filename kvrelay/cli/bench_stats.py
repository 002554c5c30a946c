"""What a benchmark says about its requests: percentiles and rates. Pure; knows neither clients nor clocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

PERCENTILES = (50.0, 90.0, 99.0)


@dataclass(slots=True)
class Sample:
    """One request as the client saw it; times in seconds of one monotonic clock.

    due_s: when it should have been sent, which in an open loop may be before it was. tokens_at_s: one per token.
    error: the name of a status code, message: what the server said.
    """

    due_s: float
    prompt_tokens: int
    tokens_at_s: list[float] = field(default_factory=list)
    exposed_s: float | None = None
    error: str = ""
    message: str = ""


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear interpolation between the closest ranks, like numpy's default. ValueError without values."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100.0
    low = int(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def summary(values: Sequence[float]) -> dict[str, float] | None:
    """{"p50", "p90", "p99", "max"} rounded to a thousandth; None without values."""
    if not values:
        return None
    named = {f"p{percent:g}": round(percentile(values, percent), 3) for percent in PERCENTILES}
    return {**named, "max": round(max(values), 3)}


def gaps_ms(times_s: Sequence[float]) -> list[float]:
    """Times between neighbouring tokens of one stream."""
    return [(later - earlier) * 1000.0 for earlier, later in pairwise(times_s)]


def ttft_ms(samples: Sequence[Sample]) -> list[float]:
    return [(s.tokens_at_s[0] - s.due_s) * 1000.0 for s in samples if s.tokens_at_s]


def describe(samples: Sequence[Sample], wall_s: float) -> dict[str, object]:
    """The figures of a run that took `wall_s`. Requests that ended in an error count only as errors."""
    good = [s for s in samples if not s.error]
    bad = [s for s in samples if s.error]
    return {
        "requests": len(samples),
        "errors": len(bad),
        "error_counts": dict(Counter(s.error for s in bad)),
        "first_error": bad[0].message if bad else None,
        "wall_s": round(wall_s, 3),
        "ttft_ms": summary(ttft_ms(good)),
        "tbt_ms": summary([gap for s in good for gap in gaps_ms(s.tokens_at_s)]),
        "output_tokens_per_s": round(sum(len(s.tokens_at_s) for s in good) / wall_s, 1),
        "prompt_tokens_per_s": round(sum(s.prompt_tokens for s in good) / wall_s, 1),
        **hand_off_figures(good),
    }


def hand_off_figures(samples: Sequence[Sample]) -> dict[str, object]:
    """Exposed hand-off (landed - token 0) and its share of TTFT, request by request; medians, None without any."""
    moved = [(s.exposed_s, s.tokens_at_s[0] - s.due_s) for s in samples if s.exposed_s is not None and s.tokens_at_s]
    if not moved:
        return {"exposed_hand_off_ms_p50": None, "exposed_hand_off_share_of_ttft_p50": None}
    return {
        "exposed_hand_off_ms_p50": round(percentile([exposed * 1000.0 for exposed, _ in moved], 50.0), 3),
        "exposed_hand_off_share_of_ttft_p50": round(percentile([e / t for e, t in moved], 50.0), 4),
    }
