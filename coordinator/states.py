"""Where a request stands, as a value: what the lifecycle steps from and to. Knows no events."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from coordinator.events import Placement
from kvrelay.requests import RequestId, Sampling, StopRule, WorkerId


class Phase(enum.Enum):
    QUEUED = "queued"
    RESERVING = "reserving"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """What a request is; never changes. deadline_at is on the clock that `now` is read from."""

    request_id: RequestId
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    stop: StopRule
    tenant: str = "default"
    cache_salt: str = ""
    deadline_at: float | None = None
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class State:
    """Where a request stands. num_tokens: output tokens journaled, over all attempts; attempt names the current try."""

    facts: RequestFacts
    phase: Phase = Phase.QUEUED
    attempt: int = 0
    num_tokens: int = 0
    placement: Placement | None = None
    tokens_so_far: tuple[int, ...] = ()
    landed: bool = False
    prefill_ended: bool = False
    decode_ended: bool = False
    refusals: int = 0

    def decoder(self) -> WorkerId | None:
        return self.placement.decode if self.placement else None

    def prefiller(self) -> WorkerId | None:
        return self.placement.prefill if self.placement else None
