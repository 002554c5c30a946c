"""Tokens a second over the last few seconds. Pure: time comes in with each sample."""

from __future__ import annotations

from collections import deque

WINDOW_S = 2.0


class Throughput:
    """Remembers what each step of the last WINDOW_S brought."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, int]] = deque()
        self._sum = 0

    def add(self, num_tokens: int, now: float) -> None:
        self._steps.append((now, num_tokens))
        self._sum += num_tokens
        self._forget(now)

    def per_s(self, now: float) -> float:
        self._forget(now)
        return self._sum / WINDOW_S

    def _forget(self, now: float) -> None:
        while self._steps and self._steps[0][0] <= now - WINDOW_S:
            self._sum -= self._steps.popleft()[1]
