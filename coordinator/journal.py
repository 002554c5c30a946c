"""The tokens of one request in the order they were accepted, each with its time. Knows no attempt and no worker."""

from __future__ import annotations

from kvrelay.steps import StepRecord


class Journal:
    """Append only: token i is accepted when exactly i tokens are in. Times are seconds on the caller's clock."""

    __slots__ = ("_times", "_token_ids", "sent", "steps")

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._times: list[float] = []
        self.steps: list[StepRecord | None] = []
        """Of the worker, that made each token; None where it does not say."""
        self.sent: list[float] = []
        """When each token had been written to the client; shorter than the others while some are on their way."""

    def append(self, index: int, token_id: int, now: float, step: StepRecord | None = None) -> None:
        if index != len(self._token_ids):
            raise ValueError(f"token {index} cannot follow {len(self._token_ids)} tokens")
        self._token_ids.append(token_id)
        self._times.append(now)
        self.steps.append(step)

    def __len__(self) -> int:
        return len(self._token_ids)

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(self._token_ids)

    @property
    def times(self) -> tuple[float, ...]:
        return tuple(self._times)
