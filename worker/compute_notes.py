"""When and how a prompt was computed here, for the trace: its wait, its chunks, what needed no computing. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvrelay.requests import SequenceKey
from kvrelay.session import ComputeRecord


@dataclass(slots=True)
class ComputeNotes:
    """Times are of the core's clock. num_cached_tokens: found in the cache when the prompt was first admitted."""

    received_at: float
    started_at: float | None = None
    token_at: float | None = None
    chunks: list[tuple[float, float, int]] = field(default_factory=list)
    num_cached_tokens: int | None = None

    def chunk(self, planned_at: float, now: float, num_tokens: int) -> None:
        """A step computed so many of its tokens."""
        if self.started_at is None:
            self.started_at = planned_at
        self.chunks.append((planned_at - self.received_at, now - planned_at, num_tokens))

    def matched(self, num_tokens: int) -> bool:
        """Admitted with so many tokens computed, as told after its first step; what was preempted later and found again
        was computed here. Returns whether it counts."""
        counts = self.num_cached_tokens is None and len(self.chunks) <= 1
        if counts:
            self.num_cached_tokens = num_tokens
        return counts

    def record(self, key: SequenceKey) -> ComputeRecord:
        started_at = self.started_at if self.started_at is not None else self.received_at
        token_at = self.token_at if self.token_at is not None else started_at
        return ComputeRecord(
            key.request_id,
            key.attempt,
            queued_s=started_at - self.received_at,
            active_s=token_at - started_at,
            chunks=tuple(self.chunks),
            num_cached_tokens=self.num_cached_tokens or 0,
        )
