"""What may happen to a request and what its lifecycle asks for in return: plain values. Knows neither wires nor clocks.

Errors that a worker reports travel as the name of their class in kvrelay.errors; `error_named` turns them back.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from kvrelay import errors
from kvrelay.blocks import Ticket
from kvrelay.errors import KVRelayError
from kvrelay.requests import FinishReason, Role, WorkerId
from kvrelay.session import Command


@dataclass(frozen=True, slots=True)
class Placement:
    """Which workers do one attempt. decode None: token 0 is all there is. prefill None: decode computes the prompt."""

    prefill: WorkerId | None
    decode: WorkerId | None
    decode_address: str = ""

    def role_of(self, worker: WorkerId) -> Role | None:
        if worker == self.prefill:
            return Role.PREFILL
        return Role.DECODE if worker == self.decode else None


class Cause(enum.Enum):
    """Why an attempt came to nothing without the request being at fault; counted by value."""

    LOST = "worker_lost"
    FAILED = "worker_failed"
    GAVE_UP = "worker_gave_up"
    NOT_TAKEN = "worker_not_taking"


@dataclass(frozen=True, slots=True)
class Loss:
    """What became of an attempt that another one makes good. words: for people, they name the worker."""

    cause: Cause
    worker: WorkerId
    words: str


# Events


@dataclass(frozen=True, slots=True)
class Place:
    """What the router said; tokens_so_far are the journal's. None: nobody has room now."""

    placement: Placement | None
    tokens_so_far: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ReservedBy:
    worker: WorkerId
    attempt: int
    ticket: Ticket | None
    """None: the worker computes the prompt itself."""


@dataclass(frozen=True, slots=True)
class RefusedBy:
    """A command that a worker did not take. code: class name of an error."""

    worker: WorkerId
    attempt: int
    code: str
    message: str = ""
    field: str = ""
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class TokenArrived:
    worker: WorkerId
    attempt: int
    index: int
    token_id: int


@dataclass(frozen=True, slots=True)
class ForkArrived:
    """The first token of each of the n sequences of a request, in their order."""

    worker: WorkerId
    attempt: int
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StopStringHit:
    """A token arrived, is acceptable (`lifecycle.accepts`), and its text completes a stop string."""

    worker: WorkerId
    attempt: int
    index: int
    token_id: int


@dataclass(frozen=True, slots=True)
class LandedAt:
    worker: WorkerId
    attempt: int


@dataclass(frozen=True, slots=True)
class PushedBy:
    worker: WorkerId
    attempt: int


@dataclass(frozen=True, slots=True)
class WorkerEnded:
    """The worker holds nothing of the sequence any more. reason: stop | length | aborted | failed."""

    worker: WorkerId
    attempt: int
    reason: str
    code: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """The session ended; everything that went through it is void."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class CheckBackDue:
    """The time that a CheckBack action asked for has come; void once the attempt is another one."""

    attempt: int


@dataclass(frozen=True, slots=True)
class ClientGone:
    pass


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    pass


@dataclass(frozen=True, slots=True)
class ReaderTooSlow:
    pass


@dataclass(frozen=True, slots=True)
class StreamFailed:
    """This coordinator cannot go on with this one stream: a detokenizer that raised, a shutdown, an empty pool."""

    error: KVRelayError


Event = (
    Place
    | ReservedBy
    | RefusedBy
    | TokenArrived
    | ForkArrived
    | StopStringHit
    | LandedAt
    | PushedBy
    | WorkerEnded
    | WorkerLost
    | CheckBackDue
    | ClientGone
    | DeadlinePassed
    | ReaderTooSlow
    | StreamFailed
)


# Actions


@dataclass(frozen=True, slots=True)
class SendCommand:
    worker: WorkerId
    command: Command


@dataclass(frozen=True, slots=True)
class Emit:
    """Journal this token and stream it."""

    index: int
    token_id: int


@dataclass(frozen=True, slots=True)
class ForkOff:
    """From here on each of the n sequences is on its own, with its first token still to be taken in."""

    worker: WorkerId
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Requeue:
    """Back into the queue, at its old place; not to be placed before this time. loss None: there was no room."""

    not_before: float
    loss: Loss | None = None


@dataclass(frozen=True, slots=True)
class CheckBack:
    """Feed CheckBackDue of this attempt at that time."""

    attempt: int
    at: float


@dataclass(frozen=True, slots=True)
class ReleasePlacement:
    """The request no longer loads these workers (None: that one is still in use)."""

    prefill: WorkerId | None
    decode: WorkerId | None


@dataclass(frozen=True, slots=True)
class Finish:
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Fail:
    """loss: of the last attempt, when that is why."""

    error: KVRelayError
    loss: Loss | None = None


@dataclass(frozen=True, slots=True)
class Drop:
    """The event was stale or out of order and changed nothing; counted by what it was."""

    what: str


Action = SendCommand | Emit | ForkOff | Requeue | CheckBack | ReleasePlacement | Finish | Fail | Drop


def error_named(
    code: str, message: str, field: str = "", retry_after_s: float | None = None, *, worker: WorkerId
) -> KVRelayError:
    """The error of this class name that a worker told of; a name that we do not know is Internal."""
    kind = getattr(errors, code, None)
    if not (isinstance(kind, type) and issubclass(kind, KVRelayError)):
        return errors.Internal(f"worker error {code!r}: {message}", field=field)
    return kind(message, field=field, retry_after_s=retry_after_s, metadata={"worker": worker})
