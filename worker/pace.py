"""How many prompt tokens a step may take so that it stays short. Pure: durations come in, a budget goes out.

The engine thread answers leases, aborts and new work between steps. A step that lasted seconds, as a full budget may on
a slow or busy machine, would let leases run out and cancels wait; so the budget follows the measured speed.
"""

from __future__ import annotations

MIN_TOKENS = 64
"""Never fewer: a step has costs of its own, and below this the weights are read for too little work."""
FIRST_TOKENS = 128
"""The budget until a step has been measured."""
SMOOTHING = 0.3


class Pace:
    """target_s: how long a step with prompt tokens should last at most; max_tokens: the budget of a fast machine."""

    def __init__(self, target_s: float, max_tokens: int) -> None:
        self._target_s = target_s
        self._max_tokens = max_tokens
        self._token_s: float | None = None

    def note(self, num_tokens: int, seconds: float) -> None:
        """A step with that many rows took that long. Small steps say little about what a row costs."""
        if num_tokens < min(MIN_TOKENS, self._max_tokens) // 2:
            return
        token_s = seconds / num_tokens
        if self._token_s is None:
            self._token_s = token_s
        else:
            self._token_s += SMOOTHING * (token_s - self._token_s)

    @property
    def budget(self) -> int:
        """Prompt tokens for the next step, MIN_TOKENS .. max_tokens, in whole blocks of 16."""
        if self._token_s is None:
            return min(FIRST_TOKENS, self._max_tokens)
        wanted = int(self._target_s / max(self._token_s, 1e-9)) // 16 * 16
        return min(self._max_tokens, max(MIN_TOKENS, wanted))
