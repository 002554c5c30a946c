"""An open request as the dispatcher keeps it: lifecycle state, journal, text, stream, and when things happened."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from coordinator.journal import Journal
from coordinator.output import OutputText
from coordinator.router import Want
from coordinator.states import RequestFacts, State
from coordinator.stream import StreamBuffer
from kvrelay.requests import FinishReason, RequestId
from kvrelay.session import ComputeRecord, Pushed


@dataclass(slots=True)
class Times:
    """Seconds on the loop's clock; None until it happened. A new attempt writes over what the old one left."""

    accepted_at: float
    accepted_ns: int
    routed_at: float | None = None
    placed_at: float | None = None
    reserved_at: float | None = None
    prefill_sent_at: float | None = None
    landed_at: float | None = None
    ended_at: float | None = None


@dataclass(slots=True)
class Live:
    """order: place in the queue, kept when the request comes back to it."""

    state: State
    order: int
    text: OutputText
    stream: StreamBuffer
    times: Times
    journal: Journal = field(default_factory=Journal)
    pending_text: str = ""
    too_slow: bool = False
    blocked_since: float | None = None
    not_before: float = 0.0
    deadline: asyncio.TimerHandle | None = None
    cached_tokens: int = 0
    pushed: Pushed | None = None
    prefill_record: ComputeRecord | None = None
    finish: FinishReason | None = None
    outcome: str = ""
    lost_worker: str = ""

    @property
    def facts(self) -> RequestFacts:
        return self.state.facts

    @property
    def id(self) -> RequestId:
        return self.state.facts.request_id

    @property
    def num_known_tokens(self) -> int:
        """Tokens that a prefill worker would have to compute now."""
        return len(self.state.facts.prompt_ids) + self.state.num_tokens

    @property
    def needs_decode(self) -> bool:
        """False when the next token is the last one: then nothing is reserved."""
        return self.state.facts.stop.max_tokens - self.state.num_tokens > 1

    @property
    def decoded(self) -> bool:
        """Whether decode produced a token in this attempt; the first is prefill's, where there is a prefill worker."""
        placement = self.state.placement
        if placement is None or placement.decode is None:
            return False
        own = self.state.num_tokens - len(self.state.tokens_so_far)
        return own > (0 if placement.prefill is None else 1)

    @property
    def handed_over(self) -> bool:
        """Whether decode produced tokens of blocks that prefill pushed."""
        placement = self.state.placement
        return self.decoded and placement is not None and placement.prefill is not None

    def want(self) -> Want:
        return Want(self.num_known_tokens, self.needs_decode, self.blocked_since, self.not_before)
