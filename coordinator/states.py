"""Where a request stands, as a value: what the lifecycle steps from and to. Knows no events."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from coordinator.events import Loss, Placement
from kvrelay.blocks import BlockKey
from kvrelay.config import MAX_ATTEMPTS
from kvrelay.requests import Priority, RequestId, Role, Sampling, StopRule, WorkerId
from kvrelay.session import Work

WORKER_EXTRA_S = 1.0
"""Workers get this much more time than the client: the coordinator enforces the deadline, they only back it up."""


class Phase(enum.Enum):
    QUEUED = "queued"
    RESERVING = "reserving"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """What a request is; never changes. deadline_at is on the clock that `now` is read from.

    n: sequences that go on from the prompt. keys: of the prompt's full blocks, as far as anybody asked for them.
    """

    request_id: RequestId
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    stop: StopRule
    tenant: str = "default"
    cache_salt: str = ""
    deadline_at: float | None = None
    traceparent: str = ""
    n: int = 1
    prefix_cache: bool = True
    keys: tuple[BlockKey, ...] = ()
    priority: Priority = Priority.NORMAL


@dataclass(frozen=True, slots=True)
class ForkName:
    """What the workers of an attempt call one of its n sequences."""

    request_id: RequestId
    attempt: int
    sequence: int


@dataclass(frozen=True, slots=True)
class Tries:
    """limit: how many attempts may be lost. refused: how often there was no room since the last loss."""

    limit: int = MAX_ATTEMPTS
    lost: int = 0
    refused: int = 0


@dataclass(frozen=True, slots=True)
class State:
    """Where a request stands. num_tokens: output tokens journaled, over all attempts; attempt names the current try.

    in_doubt: prefill is gone, token 0 is in, and decode has not said yet whether all blocks landed.
    fork: set while this is one of n sequences and still where the prompt was computed for all of them.
    """

    facts: RequestFacts
    phase: Phase = Phase.QUEUED
    attempt: int = 0
    num_tokens: int = 0
    placement: Placement | None = None
    tokens_so_far: tuple[int, ...] = ()
    landed: bool = False
    prefill_ended: bool = False
    decode_ended: bool = False
    tries: Tries = Tries()
    in_doubt: Loss | None = None
    fork: ForkName | None = None

    def decoder(self) -> WorkerId | None:
        return self.placement.decode if self.placement else None

    def prefiller(self) -> WorkerId | None:
        return self.placement.prefill if self.placement else None

    def role_of(self, worker: WorkerId, attempt: int) -> Role | None:
        """The role this worker has in the current attempt, None if it has none or speaks of another attempt."""
        if self.placement is None or attempt != self.attempt:
            return None
        return self.placement.role_of(worker)

    def with_ended(self, role: Role) -> State:
        return replace(self, prefill_ended=True) if role is Role.PREFILL else replace(self, decode_ended=True)


def work_of(state: State, now: float) -> Work:
    """What the workers of an attempt get: the prompt and the tokens so far, and the time that is left."""
    facts = state.facts
    left = None if facts.deadline_at is None else max(0.0, facts.deadline_at - now) + WORKER_EXTRA_S
    return Work(
        request_id=facts.request_id,
        attempt=state.attempt,
        token_ids=facts.prompt_ids + state.tokens_so_far,
        num_prompt_tokens=len(facts.prompt_ids),
        sampling=facts.sampling,
        stop=facts.stop,
        tenant=facts.tenant,
        cache_salt=facts.cache_salt,
        n=facts.n,
        prefix_cache=facts.prefix_cache,
        deadline_s=left,
        traceparent=facts.traceparent,
        priority=facts.priority,
    )
