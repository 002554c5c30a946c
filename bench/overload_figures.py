"""What bench/overload.py measured -> its figures, and which bounds they break. Pure: values in, values out."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from overload_client import Outcome
from running import percentile

GOODPUT_SHARE = 0.9
REFUSED_P50_MS, REFUSED_P99_MS = 20.0, 150.0
NORMAL_WITHIN_S = 5.0
RSS_GROWTH_MIB = 32.0
RAMP_S = 1.0
"""The first part of a loaded phase, while the queue fills, is no part of its goodput."""
NORMAL_SHARE, NORMAL_WINDOW_S = 0.95, 1.0


@dataclass(slots=True)
class Phase:
    """What came of one phase. Times in s on the monotonic clock."""

    name: str
    begin: float
    until: float
    outcomes: list[Outcome] = field(default_factory=list)
    queued: list[int] = field(default_factory=list)
    opened: list[int] = field(default_factory=list)
    rss_mib: dict[str, float] = field(default_factory=dict)
    """The highest seen of each process."""
    cores: dict[str, float] = field(default_factory=dict)
    """How many processors each process kept busy."""

    @property
    def goodput(self) -> float:
        """Exact answers a second, after the ramp."""
        begin = self.begin + RAMP_S
        good = sum(o.exact and begin <= o.ended < self.until for o in self.outcomes)
        return good / (self.until - begin)

    def ttft_ms(self) -> list[float]:
        return [1000 * (o.first - o.due) for o in self.outcomes if o.first is not None]


def normal_after_s(phase: Phase, limit_ms: float) -> float:
    """From when on nearly all requests of a second were answered as soon as in normal times; inf: never."""
    asked = sorted(phase.outcomes, key=lambda o: o.due)
    for outcome in asked:
        window = [o for o in asked if outcome.due <= o.due < outcome.due + NORMAL_WINDOW_S]
        good = sum(o.first is not None and 1000 * (o.first - o.due) <= limit_ms for o in window)
        if outcome.due + NORMAL_WINDOW_S <= phase.until and good >= NORMAL_SHARE * len(window):
            return outcome.due - phase.begin
    return float("inf")


def judge(phases: dict[str, Phase], quiet: bool, queue_limit: int) -> dict[str, Any]:
    """The figures, with `broken`: what each bound that does not hold says."""
    over, before, after = phases["overload"], phases["normal"], phases["after"]
    best = max(phases["best"].goodput, phases["best again"].goodput)
    refused = [o for o in over.outcomes if o.status != "OK"]
    times = [1000 * (o.ended - o.due) for o in refused]
    limit_ms = 2 * percentile(before.ttft_ms(), 0.99)
    all_outcomes = [o for phase in phases.values() for o in phase.outcomes]
    growth = {name: after.rss_mib[name] - mib for name, mib in before.rss_mib.items()}
    figures: dict[str, Any] = {
        "best_per_s": best,
        "offered_per_s": len(over.outcomes) / (over.until - over.begin),
        "goodput_per_s": over.goodput,
        "goodput_share": over.goodput / best,
        "answered": sum(o.status == "OK" for o in over.outcomes),
        "refused": len(refused),
        "refused_p50_ms": percentile(times, 0.5),
        "refused_p99_ms": percentile(times, 0.99),
        "refused_from_sent_p50_ms": percentile([1000 * (o.ended - o.sent) for o in refused], 0.5),
        "refused_from_sent_p99_ms": percentile([1000 * (o.ended - o.sent) for o in refused], 0.99),
        "sent_late_p99_ms": percentile([1000 * (o.sent - o.due) for o in over.outcomes], 0.99),
        "statuses": dict(Counter(o.status for o in over.outcomes)),
        "without_hint": sum(not o.hint for o in refused),
        "wrong_answers": sum(o.status == "OK" and not o.exact for o in all_outcomes),
        "failed_in_normal_load": sum(o.status != "OK" for o in before.outcomes),
        "queue_limit": queue_limit,
        "queued_most": max(over.queued),
        "open_most": max(over.opened),
        "ttft_ms": {name: [percentile(p.ttft_ms(), 0.5), percentile(p.ttft_ms(), 0.99)] for name, p in phases.items()},
        "normal_after_s": normal_after_s(after, limit_ms),
        "cores_busy": over.cores,
        "rss_mib_before": before.rss_mib,
        "rss_mib_growth": growth,
        "everything_given_back": quiet,
    }
    figures["broken"] = [what for what, holds in _bounds(figures).items() if not holds]
    return figures


def _bounds(f: dict[str, Any]) -> dict[str, bool]:
    return {
        f"at most {f['queue_limit']} wait": f["queued_most"] <= f["queue_limit"],
        "some were refused": f["refused"] > 0,
        "refused with RESOURCE_EXHAUSTED only": set(f["statuses"]) <= {"OK", "RESOURCE_EXHAUSTED"},
        "every refusal says when to try again": f["without_hint"] == 0,
        f"refused within {REFUSED_P50_MS:g} ms at p50": f["refused_p50_ms"] <= REFUSED_P50_MS,
        f"refused within {REFUSED_P99_MS:g} ms at p99": f["refused_p99_ms"] <= REFUSED_P99_MS,
        f"goodput at least {GOODPUT_SHARE:.0%} of the best": f["goodput_share"] >= GOODPUT_SHARE,
        f"normal {NORMAL_WITHIN_S:g} s after": f["normal_after_s"] <= NORMAL_WITHIN_S,
        f"no process grew by more than {RSS_GROWTH_MIB:g} MiB": max(f["rss_mib_growth"].values()) <= RSS_GROWTH_MIB,
        "every answer exact": f["wrong_answers"] == 0,
        "no failure in normal load": f["failed_in_normal_load"] == 0,
        "everything given back": bool(f["everything_given_back"]),
    }
