"""Tokens a second over the last few seconds. Pure: time comes in with each sample."""

from __future__ import annotations

WINDOW_S = 2.0


class Throughput:
    """Counts into windows of WINDOW_S; `per_s` is the last full window's rate, 0 after a silent one."""

    def __init__(self) -> None:
        self._started_at = 0.0
        self._count = 0
        self._rate = 0.0
        self._rated_at = 0.0

    def add(self, num_tokens: int, now: float) -> None:
        elapsed = now - self._started_at
        if elapsed >= WINDOW_S:
            self._rate = self._count / elapsed if elapsed < 2 * WINDOW_S else 0.0
            self._rated_at = now
            self._started_at = now
            self._count = 0
        self._count += num_tokens

    def per_s(self, now: float) -> float:
        return self._rate if now - self._rated_at < 2 * WINDOW_S else 0.0
