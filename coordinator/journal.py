"""The tokens of one request in the order they were accepted, each with its time. Knows no attempt and no worker."""

from __future__ import annotations


class Journal:
    """Append only: token i is accepted when exactly i tokens are in. Times are seconds on the caller's clock."""

    __slots__ = ("_times", "_token_ids")

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._times: list[float] = []

    def append(self, index: int, token_id: int, now: float) -> None:
        if index != len(self._token_ids):
            raise ValueError(f"token {index} cannot follow {len(self._token_ids)} tokens")
        self._token_ids.append(token_id)
        self._times.append(now)

    def __len__(self) -> int:
        return len(self._token_ids)

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(self._token_ids)

    @property
    def times(self) -> tuple[float, ...]:
        return tuple(self._times)
