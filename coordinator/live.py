"""An open request as the dispatcher keeps it: lifecycle state, journal, text, stream, and when things happened.

Of a request for n sequences there are n + 1: that of the prompt until the fork, and one of each sequence after it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from coordinator.events import Cause, Loss, Placement
from coordinator.journal import Journal
from coordinator.output import OutputText
from coordinator.states import RequestFacts, State
from coordinator.steps_heard import WorkerSteps
from coordinator.stream import StreamBuffer
from coordinator.views import Want
from kvrelay.requests import FinishReason, Logprobs, RequestId, WorkerId
from kvrelay.session import ComputeRecord, Pushed, TokenOut


@dataclass(slots=True)
class Times:
    """Of the whole request; seconds on the loop's clock, None until it happened."""

    accepted_at: float
    accepted_ns: int
    ended_at: float | None = None


@dataclass(slots=True)
class Attempt:
    """What is known of one try. first_index: of the token it begins with. Times as in Times, lost_at with the loss.

    An attempt that found no room is written over by the next one; one that was lost is kept for the trace.
    prefill_gone: no figures of the hand-off will come any more.
    """

    queued_at: float
    number: int = 0
    first_index: int = 0
    placement: Placement | None = None
    routed_at: float | None = None
    placed_at: float | None = None
    reserved_at: float | None = None
    prefill_sent_at: float | None = None
    landed_at: float | None = None
    pushed: Pushed | None = None
    prefill_record: ComputeRecord | None = None
    """Of the worker that computed the prompt: prefill, or decode where there is none."""
    num_cached_blocks: int = 0
    """Blocks that decode had cached: they need not be moved."""
    prefill_gone: bool = False
    first_tokens: dict[int, TokenOut] = field(default_factory=dict)
    """Of a request for n sequences before its fork: those that have come, by sequence."""
    loss: Loss | None = None
    lost_at: float | None = None
    steps: WorkerSteps | None = None
    """Of the decode worker."""

    @property
    def has_begun(self) -> bool:
        """Whether a worker may have computed any of the prompt."""
        if self.loss is not None and self.loss.cause is Cause.NOT_TAKEN:
            return False
        alone = self.placement is not None and self.placement.prefill is None
        return (self.reserved_at if alone else self.prefill_sent_at) is not None

    def to_avoid(self) -> tuple[WorkerId, ...]:
        """With whom not to try again. Of a hand-off that failed nobody knows which of the two it was."""
        loss, placement = self.loss, self.placement
        if loss is None:
            return ()
        if loss.cause is Cause.FAILED and self.landed_at is None and placement is not None:
            return tuple(worker for worker in (placement.prefill, placement.decode) if worker is not None)
        return (loss.worker,)


@dataclass(slots=True)
class Live:
    """order: place in the queue among its class, kept when it comes back to it. lost: earlier attempts, oldest first.

    sequence: which of the n sequences this is. more_texts: of the sequences after the first, until the fork; children:
    the n sequences, from then on; parent: whose they are. cached_tokens: prompt tokens that the attempt which brought
    index 0 did not compute. pending_text and pending_logprobs: of the token that is being taken in.
    """

    state: State
    order: int
    text: OutputText
    stream: StreamBuffer
    times: Times
    attempt: Attempt
    journal: Journal = field(default_factory=Journal)
    lost: list[Attempt] = field(default_factory=list)
    pending_text: str = ""
    pending_logprobs: Logprobs | None = None
    too_slow: bool = False
    blocked_since: float | None = None
    not_before: float = 0.0
    deadline: asyncio.TimerHandle | None = None
    cached_tokens: int = 0
    finish: FinishReason | None = None
    outcome: str = ""
    sequence: int = 0
    more_texts: tuple[OutputText, ...] = ()
    prompt_text: str = ""
    """For who asked for an echo."""
    children: tuple[Live, ...] = ()
    parent: Live | None = field(default=None, repr=False, compare=False)

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
        """Whether decode produced tokens of blocks that prefill pushed in this attempt."""
        placement = self.state.placement
        return self.decoded and placement is not None and placement.prefill is not None

    def want(self) -> Want:
        last_slots = len(self.facts.prompt_ids) + self.facts.stop.max_tokens - 1
        return Want(
            num_tokens=self.num_known_tokens,
            needs_decode=self.needs_decode,
            blocked_since=self.blocked_since,
            not_before=self.not_before,
            last_slots=last_slots,
            avoid=self.lost[-1].to_avoid() if self.lost else (),
            keys=self.facts.keys,
            num_sequences=self.facts.n,
            priority=self.facts.priority,
        )

    def anew(self, loss: Loss | None, now: float) -> None:
        """Nothing that is known of the attempt before holds for the one that the state speaks of now."""
        queued_at = self.attempt.queued_at
        if loss is not None:
            self.attempt.loss, self.attempt.lost_at, queued_at = loss, now, now
            self.lost.append(self.attempt)
        if self.state.num_tokens == 0:
            self.cached_tokens = 0
        self.attempt = Attempt(queued_at, self.state.attempt, self.state.num_tokens)
