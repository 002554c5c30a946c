"""What a worker says of its steps, and what its steps cost: a model fitted while they come. Knows no gap and no wire.

forward_s is taken as a + b * batch + c * prefill_tokens: weighted least squares over running sums that slowly forget.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

MIN_STEPS = 8
"""With fewer nothing is known of what a step should cost."""
KEEP = 0.9995
"""What each step leaves of the weight of those before it: a few thousand steps are remembered."""
TRUST_PREFILLS = 4
"""Steps with prompt tokens that are taken as they come: the first of a kind looks like an outlier."""
KEPT_STEPS = 4096


class StepRecord(NamedTuple):
    """One step of a worker. Seconds; start_s on the worker's monotonic clock. One is made per step, hence a tuple.

    The phases follow each other without a break, so they end at the moment the step's tokens were handed over.
    batch: sequences that sampled. transfers: hand-offs in flight. swapped_blocks: moved to or from host memory.
    """

    step_id: int
    start_s: float
    schedule_s: float = 0.0
    build_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0
    send_s: float = 0.0
    batch: int = 0
    prefill_tokens: int = 0
    num_tokens: int = 0
    blocks_used: int = 0
    transfers: int = 0
    preemptions: int = 0
    swapped_blocks: int = 0

    @property
    def duration_s(self) -> float:
        return self.schedule_s + self.build_s + self.forward_s + self.sample_s + self.send_s

    @property
    def end_s(self) -> float:
        return self.start_s + self.duration_s


class Shares(NamedTuple):
    """What a forward pass should take: with one sequence, with the others of the batch, with prompt tokens."""

    base_s: float
    growth_s: float
    prefill_s: float

    @property
    def total_s(self) -> float:
        return self.base_s + self.growth_s + self.prefill_s


class CostModel:
    """Fitted on each step as it comes. A step far above what was to be expected counts as three times that."""

    def __init__(self) -> None:
        self._first: list[StepRecord] = []
        self._prefills = 0
        self._num_fitted = self._fit_again = 0
        """Solved anew not at every step, but soon after new kinds of steps."""
        # Sums over w, x = batch, p = prefill tokens, y = forward seconds; w = 1 / expected^2: errors are relative.
        self._w = self._x = self._p = self._y = 0.0
        self._xx = self._xp = self._pp = self._xy = self._py = 0.0
        self._fit: tuple[float, float, float] | None = None
        self._known = False

    @property
    def is_ready(self) -> bool:
        return self._known

    def add(self, step: StepRecord) -> None:
        if self._known:
            self._add(step, self._usual(step))
            return
        self._first.append(step)
        if len(self._first) >= MIN_STEPS:
            self._begin()

    def shares(self, step: StepRecord) -> Shares:
        """Never negative. Without a model all of the pass is base; its sum need not be the step's own time."""
        if not self._known:
            return Shares(step.forward_s, 0.0, 0.0)
        a, b, c = self._coefficients()
        return Shares(a + b, b * max(0, step.batch - 1), c * step.prefill_tokens)

    def _begin(self) -> None:
        plain = sorted(step.forward_s for step in self._first if not step.prefill_tokens)
        ceiling = 3 * plain[len(plain) // 2] + 0.001 if plain else float("inf")
        first, self._first, self._known = self._first, [], True
        for step in first:
            usual = step.forward_s if step.prefill_tokens else min(step.forward_s, ceiling)
            self._add(step, usual)

    def _usual(self, step: StepRecord) -> float:
        if step.prefill_tokens and self._prefills < TRUST_PREFILLS:
            return step.forward_s
        a, b, c = self._coefficients()
        return min(step.forward_s, 3 * (a + b * step.batch + c * step.prefill_tokens) + 0.001)

    def _add(self, step: StepRecord, y: float) -> None:
        x, p = step.batch, step.prefill_tokens
        w = 1.0 / max(y, 1e-5) ** 2
        self._prefills += p > 0
        self._w = self._w * KEEP + w
        self._x = self._x * KEEP + w * x
        self._p = self._p * KEEP + w * p
        self._y = self._y * KEEP + w * y
        self._xx = self._xx * KEEP + w * x * x
        self._xp = self._xp * KEEP + w * x * p
        self._pp = self._pp * KEEP + w * p * p
        self._xy = self._xy * KEEP + w * x * y
        self._py = self._py * KEEP + w * p * y
        self._num_fitted += 1
        if self._num_fitted >= self._fit_again or (p and self._prefills <= TRUST_PREFILLS):
            self._fit_again = self._num_fitted + min(64, 1 + self._num_fitted // 8)
            self._fit = None

    def _coefficients(self) -> tuple[float, float, float]:
        """a, b, c, none of them negative."""
        if self._fit is None:
            self._fit = self._solve()
        return self._fit

    def _solve(self) -> tuple[float, float, float]:
        w = self._w
        x, p, y = self._x / w, self._p / w, self._y / w
        xx, xp, pp = self._xx / w - x * x, self._xp / w - x * p, self._pp / w - p * p
        xy, py = self._xy / w - x * y, self._py / w - p * y
        b, c = _slopes(xx, xp, pp, xy, py)
        a = y - b * x - c * p
        if a < 0.0:  # all that grows, through the origin
            b, c = _slopes(self._xx / w, self._xp / w, self._pp / w, self._xy / w, self._py / w)
            a = 0.0
        return a, b, c


def _slopes(xx: float, xp: float, pp: float, xy: float, py: float) -> tuple[float, float]:
    """b and c of two regressors by their (co)variances; what varies too little to tell gets none, none is negative."""
    x_varies, p_varies = xx > 1e-6, pp > 1e-6
    determinant = xx * pp - xp * xp
    if x_varies and p_varies and determinant > 1e-6 * xx * pp:
        b, c = (xy * pp - py * xp) / determinant, (py * xx - xy * xp) / determinant
        if b >= 0 and c >= 0:
            return b, c
        if b < 0:
            return 0.0, max(0.0, py / pp)
        return max(0.0, xy / xx), 0.0
    if p_varies:
        return 0.0, max(0.0, py / pp)
    return (max(0.0, xy / xx), 0.0) if x_varies else (0.0, 0.0)


class StepLog:
    """The steps of one incarnation of a worker: what they cost, and the last `limit` of them by id."""

    def __init__(self, limit: int = KEPT_STEPS) -> None:
        self.costs = CostModel()
        self._by_id: dict[int, StepRecord] = {}
        self._order: deque[int] = deque()
        self._limit = limit
        self._typical: list[float] | None = None
        self.parts: dict[int, tuple[float, ...]] = {}
        """What kvrelay.gaps made of steps: once per step, not once per token."""

    def add(self, step: StepRecord) -> None:
        """Steps come in order; one that is known already is left out."""
        if step.step_id in self._by_id:
            return
        self.costs.add(step)
        self._by_id[step.step_id] = step
        self._order.append(step.step_id)
        if len(self._order) > self._limit:
            oldest = self._order.popleft()
            del self._by_id[oldest]
            self.parts.pop(oldest, None)
        self._learn(step)

    def get(self, step_id: int) -> StepRecord | None:
        return self._by_id.get(step_id)

    def typical(self) -> list[float]:
        """Usual seconds of schedule, build, sample, send."""
        return self._typical or [0.0, 0.0, 0.0, 0.0]

    def _learn(self, step: StepRecord) -> None:
        known = self._typical
        if known is None:
            self._typical = [step.schedule_s, step.build_s, step.sample_s, step.send_s]
            return
        known[0] += (min(step.schedule_s, 3 * known[0] + 1e-4) - known[0]) * 0.02
        known[1] += (min(step.build_s, 3 * known[1] + 1e-4) - known[1]) * 0.02
        known[2] += (min(step.sample_s, 3 * known[2] + 1e-4) - known[2]) * 0.02
        known[3] += (min(step.send_s, 3 * known[3] + 1e-4) - known[3]) * 0.02
