"""Sums over all requests of a coordinator, for its metrics. Pure; knows no exporter and no worker."""

from __future__ import annotations

from collections import Counter

from coordinator.late import Gaps
from kvrelay.gaps import CAUSES
from kvrelay.session import Pushed
from kvrelay.telemetry.buckets import Buckets
from kvrelay.telemetry.names import GAP_BUCKETS, SECONDS_BUCKETS


class RequestFigures:
    """started = open + the sum of outcomes. A request for n sequences is one; any that failed says how it ended."""

    def __init__(self) -> None:
        self.started = 0
        self.outcomes: Counter[str] = Counter()
        self.gaps = Buckets(GAP_BUCKETS)
        self.ttft = Buckets(SECONDS_BUCKETS)
        self.duration = Buckets(SECONDS_BUCKETS)
        self.gap_seconds = [0.0] * len(CAUSES)
        self.cache_queried = self.cache_matched = 0
        self.pushes: Counter[str] = Counter()
        self.pushed_bytes: Counter[str] = Counter()
        self.push_seconds: dict[str, float] = {}
        self.exposed = Buckets(SECONDS_BUCKETS)

    @property
    def open(self) -> int:
        return self.started - sum(self.outcomes.values())

    def ended(self, outcome: str, queried_tokens: int, matched_tokens: int) -> None:
        self.outcomes[outcome] += 1
        self.cache_queried += queried_tokens
        self.cache_matched += matched_tokens

    def handed_over(self, pushed: Pushed) -> None:
        """Blocks that went from prefill to decode, by transport."""
        name = pushed.transport
        self.pushes[name] += 1
        self.pushed_bytes[name] += pushed.num_bytes
        self.push_seconds[name] = self.push_seconds.get(name, 0.0) + pushed.seconds
        self.exposed.add(pushed.exposed_s)

    def measured(self, gaps: Gaps, ttft_s: float | None, duration_s: float) -> None:
        for ordered in gaps.gaps:
            self.gaps.add_sorted(ordered)
        for cause, seconds in enumerate(gaps.by_cause):
            self.gap_seconds[cause] += seconds
        if ttft_s is not None:
            self.ttft.add(ttft_s)
        self.duration.add(duration_s)
