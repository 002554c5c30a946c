"""What a coordinator and a worker tell each other over their session. Knows neither protos nor sockets.

Down: commands, ordered, delivered at most once, void when the session ends. Up: one Report per engine step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from kvrelay.blocks import BlockCounts, BlockEvents, KVLayout, Ticket
from kvrelay.requests import Incarnation, Logprobs, Priority, RequestId, Role, Sampling, SessionId, StopRule, WorkerId
from kvrelay.steps import StepRecord

PROTOCOL_VERSION = 1
HEARTBEAT_S = 0.5
COORDINATOR_GIVES_UP_S = 2.5
WORKER_GIVES_UP_S = 10.0
MAX_FRAME_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """What must be equal for two processes to serve one model. fingerprint hashes config and weights' contents.

    tokenizer_hash: what texts become, and what a grammar allows; "" for a model without a tokenizer of its own.
    """

    model_id: str
    fingerprint: str
    vocab_size: int
    max_context: int
    tokenizer_hash: str = ""


@dataclass(frozen=True, slots=True)
class WorkerDescription:
    """What a worker says of itself when it registers and when it is asked (Describe)."""

    worker_id: WorkerId
    role: Role
    incarnation: Incarnation
    pid: int
    address: str
    model: ModelIdentity
    layout: KVLayout
    num_blocks: int
    transport: str
    executor: str
    max_sequences: int
    step_tokens: int
    protocol_version: int = PROTOCOL_VERSION
    verify_kv: bool = False
    prefix_cache: bool = False


@dataclass(frozen=True, slots=True)
class Work:
    """One attempt of a request, as a worker gets it. deadline_s is the time left, None without a deadline.

    n: sequences that go on from these tokens; prefill samples one token for each. prefix_cache: may use and fill it.
    """

    request_id: RequestId
    attempt: int
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling: Sampling
    stop: StopRule
    tenant: str = "default"
    cache_salt: str = ""
    n: int = 1
    deadline_s: float | None = None
    traceparent: str = ""
    prefix_cache: bool = True
    priority: Priority = Priority.NORMAL

    @property
    def first_index(self) -> int:
        """Output index of the next token sampled."""
        return len(self.token_ids) - self.num_prompt_tokens


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a prefill worker pushes to."""

    worker_id: WorkerId
    address: str
    ticket: Ticket


# Commands, coordinator -> worker


@dataclass(frozen=True, slots=True)
class Hello:
    """First message of a session. A new session of the same coordinator ends its old one.

    steps: reports are to say what each step took.
    """

    coordinator_id: str
    session_id: SessionId
    protocol_version: int = PROTOCOL_VERSION
    steps: bool = False


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """sent_at_s: the sender's monotonic clock, telemetry only; decides nothing."""

    seq: int
    sent_at_s: float


@dataclass(frozen=True, slots=True)
class Prefill:
    """Compute the prompt, sample the next token, push the blocks. destination None: sample only (nothing to push)."""

    work: Work
    destination: Destination | None


@dataclass(frozen=True, slots=True)
class Reserve:
    """Reserve blocks for a hand-off. The worker answers Reserved or Refused.

    local_prefill: nobody pushes; decode computes the prompt itself and samples the first tokens too.
    """

    work: Work
    local_prefill: bool = False


@dataclass(frozen=True, slots=True)
class Start:
    """The token sampled by prefill is journaled: decode may run once the blocks landed. One token per sequence."""

    request_id: RequestId
    attempt: int
    first_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Abort:
    """Ends an attempt, known or not yet known to the worker (then it leaves a tombstone).

    sequence: only this one of the n sequences of a running attempt; None: all.
    """

    request_id: RequestId
    attempt: int
    sequence: int | None = None


@dataclass(frozen=True, slots=True)
class Drain:
    grace_s: float


Command = Hello | Heartbeat | Prefill | Reserve | Start | Abort | Drain


# Report items, worker -> coordinator


@dataclass(frozen=True, slots=True)
class Reserved:
    """ticket None: the worker computes the prompt itself."""

    request_id: RequestId
    attempt: int
    ticket: Ticket | None


@dataclass(frozen=True, slots=True)
class Refused:
    """A command that was not taken. code is the class name of an error of kvrelay.errors."""

    request_id: RequestId
    attempt: int
    code: str
    message: str
    field: str = ""
    retry_after_s: float | None = None


class TokenOut(NamedTuple):
    """One per token of every stream: a tuple is made in a third of a dataclass's time."""

    request_id: RequestId
    attempt: int
    sequence: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs here
    token_id: int
    logprobs: Logprobs | None = None


@dataclass(frozen=True, slots=True)
class Landed:
    """All blocks of the attempt are held by decode."""

    request_id: RequestId
    attempt: int


@dataclass(frozen=True, slots=True)
class Pushed:
    """What a hand-off cost, by the prefill worker's clock.

    seconds: the sum of its writes, each from post to done; exposed_s: from token 0 to landed, never negative.
    """

    request_id: RequestId
    attempt: int
    transport: str
    num_blocks: int
    num_bytes: int
    num_parts: int
    seconds: float
    exposed_s: float


@dataclass(frozen=True, slots=True)
class Ended:
    """The worker holds nothing of this sequence any more but, on prefill, blocks whose writes have not ended.

    reason: stop | length | aborted | failed; on failed, code and message name the error.
    """

    request_id: RequestId
    attempt: int
    sequence: int
    reason: str
    code: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True)
class ComputeRecord:
    """What prefill or decode did for an attempt, for the trace: durations on the worker's clock.

    chunks: (offset from received_s, duration, tokens) of each prompt chunk. num_cached_tokens: known tokens whose KV
    was found in the worker's cache and not computed.
    """

    request_id: RequestId
    attempt: int
    queued_s: float
    active_s: float
    chunks: tuple[tuple[float, float, int], ...] = ()
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Load:
    """How busy a worker is. queued_tokens: known but not yet computed tokens of all its sequences.

    unwell: its engine does not come round, or moves nothing although there is work; the figures may be old then.
    """

    blocks: BlockCounts
    running: int = 0
    waiting: int = 0
    queued_tokens: int = 0
    transfers_in_flight: int = 0
    tokens_per_s: float = 0.0
    draining: bool = False
    counters: tuple[tuple[str, int], ...] = ()
    unwell: bool = False


@dataclass(frozen=True, slots=True)
class Report:
    """One message up. Later steps merge into a report not yet sent (`merge`); order inside each list is kept.

    A reader takes the lists in the order of the fields, but steps and records before tokens.
    steps: each of the worker's steps once per session, in order. step_tokens: how many of this report's tokens, in
    order, each of them made. heartbeat_at_s: when that heartbeat came, on the worker's monotonic clock as sent_at_s.
    """

    step_id: int = 0
    sent_at_s: float = 0.0
    heartbeat_seq: int = 0
    welcome: WorkerDescription | None = None
    reserved: tuple[Reserved, ...] = ()
    refused: tuple[Refused, ...] = ()
    tokens: tuple[TokenOut, ...] = ()
    landed: tuple[Landed, ...] = ()
    pushed: tuple[Pushed, ...] = ()
    records: tuple[ComputeRecord, ...] = ()
    ended: tuple[Ended, ...] = ()
    load: Load | None = field(default=None)
    block_events: tuple[BlockEvents, ...] = ()
    steps: tuple[StepRecord, ...] = ()
    step_tokens: tuple[int, ...] = ()
    heartbeat_at_s: float = 0.0

    def merge(self, later: Report) -> Report:
        """One report that says what both said; the later step id, heartbeat and load win."""
        return Report(
            step_id=later.step_id or self.step_id,
            sent_at_s=later.sent_at_s or self.sent_at_s,
            heartbeat_seq=later.heartbeat_seq or self.heartbeat_seq,
            welcome=later.welcome or self.welcome,
            reserved=self.reserved + later.reserved,
            refused=self.refused + later.refused,
            tokens=self.tokens + later.tokens,
            landed=self.landed + later.landed,
            pushed=self.pushed + later.pushed,
            records=self.records + later.records,
            ended=self.ended + later.ended,
            load=later.load or self.load,
            block_events=self.block_events + later.block_events,
            steps=self.steps + later.steps,
            step_tokens=self.step_tokens + later.step_tokens,
            heartbeat_at_s=later.heartbeat_at_s or self.heartbeat_at_s,
        )
