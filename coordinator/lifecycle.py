"""The life of one request as a pure function: (state, event, now) -> (state, actions). Knows no I/O and no text.

1. QUEUED      waits for a placement
2. RESERVING   decode was asked for blocks (skipped when token 0 is all there is)
3. PREFILLING  prefill computes the prompt; decode's blocks fill meanwhile
4. DECODING    token 0 is journaled and Start is sent; the blocks may or may not have landed
5. ENDED       exactly one Finish or Fail was returned; nothing that comes later has an effect

Without a prefill worker decode computes the prompt itself: it is RESERVING, then DECODING from token 0 on.

A request for n sequences lives like that until their n first tokens are in. Then it ENDS with ForkOff and no other
last word, and each sequence goes on as a request of its own (coordinator.forks).

A worker that is lost, gives up or fails with what may be tried again sends the request from any phase back to QUEUED
with the tokens so far (coordinator.moves).

A token counts only if its attempt is current, it comes from the worker whose turn it is, and its index is the number
of tokens journaled. Each new placement is a new attempt; what an older one still says is dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from coordinator.events import (
    Action,
    Cause,
    CheckBackDue,
    ClientGone,
    DeadlinePassed,
    Drop,
    Emit,
    Event,
    Fail,
    Finish,
    ForkArrived,
    LandedAt,
    Loss,
    Place,
    PushedBy,
    ReaderTooSlow,
    RefusedBy,
    ReleasePlacement,
    ReservedBy,
    SendCommand,
    StopStringHit,
    StreamFailed,
    TokenArrived,
    WorkerEnded,
    WorkerLost,
    error_named,
)
from coordinator.forks import accepts_fork, fork
from coordinator.moves import Step, end, lost, move, no_room, without
from coordinator.states import Phase, State, work_of
from kvrelay import errors
from kvrelay.requests import FinishReason, Role
from kvrelay.session import Destination, Prefill, Reserve, Start


def step(state: State, event: Event, now: float) -> Step:
    """The one door: what `event` does to `state`. Never raises for anything that a worker or a client may cause."""
    return TABLE[state.phase, type(event)](state, event, now)


def accepts(state: State, event: TokenArrived) -> bool:
    """Whether `step` would journal this token. The caller looks at its text only then."""
    if state.placement is None or event.attempt != state.attempt or event.index != state.num_tokens:
        return False
    if state.facts.n != 1:
        return False
    if state.phase is Phase.DECODING:
        return event.worker == state.placement.decode
    return state.phase is Phase.PREFILLING and event.worker == state.placement.prefill


# QUEUED


def _place(state: State, event: Place, now: float) -> Step:
    placement = event.placement
    if placement is None:
        return state, []
    state = replace(
        state, placement=placement, tokens_so_far=event.tokens_so_far, prefill_ended=placement.prefill is None
    )
    work = work_of(state, now)
    if placement.decode is None:
        assert placement.prefill is not None
        state = replace(state, phase=Phase.PREFILLING, decode_ended=True)
        return state, [SendCommand(placement.prefill, Prefill(work, None))]
    reserve = Reserve(work, local_prefill=placement.prefill is None)
    return replace(state, phase=Phase.RESERVING), [SendCommand(placement.decode, reserve)]


# RESERVING


def _reserved(state: State, event: ReservedBy, now: float) -> Step:
    placement = state.placement
    if placement is None or event.attempt != state.attempt or event.worker != placement.decode:
        return _drop(state, event, now)
    if (placement.prefill is None) is not (event.ticket is None):
        words = f"decode worker {event.worker} answered a reserve of another kind than it was sent"
        return move(state, Loss(Cause.FAILED, event.worker, words), now)
    if placement.prefill is None or event.ticket is None:
        return replace(state, phase=Phase.DECODING, landed=True), []
    destination = Destination(placement.decode, placement.decode_address, event.ticket)
    command = Prefill(work_of(state, now), destination)
    return replace(state, phase=Phase.PREFILLING), [SendCommand(placement.prefill, command)]


def _refused(state: State, event: RefusedBy, now: float) -> Step:
    """No room at this moment sends the request back to the queue, and so does a worker that is about to go.

    Any other refusal is the client's answer. But one that has run already was right, and where it asks too much now,
    that is the fault of the worker that is left: it moves until a better one is there, or its attempts are used up.
    """
    role = state.role_of(event.worker, event.attempt)
    if role is None:
        return _drop(state, event, now)
    state = state.with_ended(role)
    if event.code == errors.ResourceExhausted.__name__:
        return no_room(state, now)
    error = error_named(event.code, event.message, event.field, event.retry_after_s, worker=event.worker)
    has_run = bool(state.tokens_so_far) or state.tries.lost > 0
    if not error.retryable and not (has_run and isinstance(error, errors.InvalidArgument)):
        return end(state, Fail(error))
    words = f"{role} worker {event.worker} did not take it: {event.message}"
    return move(state, Loss(Cause.NOT_TAKEN, event.worker, words), now)


# PREFILLING and DECODING


def _token(state: State, event: TokenArrived | StopStringHit, now: float) -> Step:
    if not accepts(state, event):  # type: ignore[arg-type]  # both events have the fields it reads
        return _drop(state, event, now)
    emit = Emit(event.index, event.token_id)
    reason = state.facts.stop.finish_of(event.index, event.token_id)
    by_text = type(event) is StopStringHit
    counted = _counted(state)
    if by_text or reason is not None:
        return _finish(counted, emit, FinishReason.STOP if by_text else reason, by_text)
    if state.phase is Phase.DECODING:
        return counted, [emit]
    return _start(counted, emit)


def _counted(state: State) -> State:
    """One token more; one of decode proves that the blocks landed: no doubt is left. Spelled out: it runs per token."""
    return State(
        state.facts,
        state.phase,
        state.attempt,
        state.num_tokens + 1,
        state.placement,
        state.tokens_so_far,
        state.landed or state.phase is Phase.DECODING,
        state.prefill_ended,
        state.decode_ended,
        state.tries,
        None,
        state.fork,
    )


def _start(state: State, emit: Emit) -> Step:
    """Token 0 of this attempt is in and the request goes on: decode may run once the blocks landed."""
    placement = state.placement
    assert placement is not None
    assert placement.decode is not None, "a request placed on prefill alone ends with its token"
    if state.fork is not None:  # decode was told of all n
        return replace(state, phase=Phase.DECODING), [emit]
    start = Start(state.facts.request_id, state.attempt, (emit.token_id,))
    actions: list[Action] = [emit, SendCommand(placement.decode, start), ReleasePlacement(placement.prefill, None)]
    return replace(state, phase=Phase.DECODING), actions


def _finish(state: State, emit: Emit, reason: FinishReason | None, by_text: bool) -> Step:
    """Ends well. A worker whose own rule was met by its own token ends by itself; the others get an Abort.

    So does a prefill worker whose blocks have landed, as a token of decode proves: an Abort might reach it before it
    hears of that itself, and its figures of the hand-off would be lost.
    """
    assert reason is not None
    if state.phase is Phase.DECODING:
        state = replace(state, prefill_ended=True, decode_ended=not by_text)
    elif state.decoder() is None:
        state = replace(state, prefill_ended=True)
    elif state.fork is not None:  # decode has the first tokens of all n, and knows those that end by rule
        state = replace(state, decode_ended=state.facts.stop.finish_of(emit.index, emit.token_id) is not None)
    ended, actions = end(state, Finish(reason))
    return ended, [emit, *actions]


def _fork(state: State, event: ForkArrived, now: float) -> Step:
    return fork(state, event) if accepts_fork(state, event) else _drop(state, event, now)


def _landed(state: State, event: LandedAt, now: float) -> Step:
    if state.role_of(event.worker, event.attempt) is None:
        return _drop(state, event, now)
    return replace(state, landed=True, in_doubt=None), []


def _pushed(state: State, event: PushedBy, now: float) -> Step:
    """A measurement that the caller keeps for the trace. Prefill makes it when decode has told it of landed."""
    if state.role_of(event.worker, event.attempt) is not Role.PREFILL:
        return _drop(state, event, now)
    return replace(state, landed=True, in_doubt=None), []


def _worker_ended(state: State, event: WorkerEnded, now: float) -> Step:
    """Fine for a prefill worker that did its part; else the tokens will not come from here."""
    role = state.role_of(event.worker, event.attempt)
    if role is None:
        return _drop(state, event, now)
    state = state.with_ended(role)
    if role is Role.PREFILL and state.phase is Phase.DECODING and (event.reason in ("stop", "length") or state.landed):
        return replace(state, landed=True, in_doubt=None), []
    who = f"{role} worker {event.worker}"
    if event.reason == "aborted":
        words = f"{who} gave the request up: {event.message or 'aborted'}"
        return without(state, role, Loss(Cause.GAVE_UP, event.worker, words), now)
    if event.reason != "failed":
        early = f"{who} ended the sequence ({event.reason}) before the request was complete"
        return end(state, Fail(errors.Internal(early)))
    if event.code == errors.InvalidArgument.__name__:  # its own fault: no worker and no hand-off matters
        return end(state, Fail(errors.InvalidArgument(event.message)))
    words = f"{who}: {event.message}{_other_end(state, role)}"
    error = error_named(event.code, words, worker=event.worker)
    if isinstance(error, errors.DeadlineExceeded):  # by a clock that leapt: ours alone ends a request for its time
        return without(state, role, Loss(Cause.GAVE_UP, event.worker, words), now)
    if error.retryable:
        return without(state, role, Loss(Cause.FAILED, event.worker, words), now)
    return end(state, Fail(error))


def _other_end(state: State, role: Role) -> str:
    """Who else took part in a hand-off that is not over: what one worker reports may be the other one's death."""
    if state.landed:
        return ""
    other, way = (state.prefiller(), "from prefill") if role is Role.DECODE else (state.decoder(), "to decode")
    return f" (hand-off {way} worker {other})" if other is not None else ""


def _worker_lost(state: State, event: WorkerLost, now: float) -> Step:
    role = state.role_of(event.worker, state.attempt)
    if role is None:
        return _drop(state, event, now)
    return without(state.with_ended(role), role, lost(event.worker, role), now)


def _check_back(state: State, event: CheckBackDue, now: float) -> Step:
    """Decode has not said in time that nothing is missing."""
    if event.attempt != state.attempt or state.in_doubt is None:
        return _drop(state, event, now)
    return move(state, state.in_doubt, now)


# Every phase


def _client_gone(state: State, event: ClientGone, now: float) -> Step:
    return end(state, Fail(errors.Cancelled("the client left")))


def _deadline_passed(state: State, event: DeadlinePassed, now: float) -> Step:
    return end(state, Fail(errors.DeadlineExceeded(f"deadline passed while {state.phase.value}")))


def _reader_too_slow(state: State, event: ReaderTooSlow, now: float) -> Step:
    return end(state, Fail(errors.ResourceExhausted("the reader is too slow; its stream was cut")))


def _stream_failed(state: State, event: StreamFailed, now: float) -> Step:
    return end(state, Fail(event.error))


def _drop(state: State, event: Event, now: float) -> Step:
    return state, [Drop(type(event).__name__)]


_ALWAYS: dict[type, Callable[[State, Any, float], Step]] = {
    ClientGone: _client_gone,
    DeadlinePassed: _deadline_passed,
    ReaderTooSlow: _reader_too_slow,
    StreamFailed: _stream_failed,
}
_WITH_WORKERS: dict[type, Callable[[State, Any, float], Step]] = {
    **_ALWAYS,
    Place: _drop,
    ReservedBy: _drop,
    RefusedBy: _refused,
    WorkerEnded: _worker_ended,
    WorkerLost: _worker_lost,
    CheckBackDue: _drop,
    LandedAt: _drop,
    PushedBy: _drop,
    TokenArrived: _drop,
    ForkArrived: _drop,
    StopStringHit: _drop,
}
_RUNNING: dict[type, Callable[[State, Any, float], Step]] = {
    **_WITH_WORKERS,
    TokenArrived: _token,
    ForkArrived: _fork,
    StopStringHit: _token,
    CheckBackDue: _check_back,
    LandedAt: _landed,
    PushedBy: _pushed,
}
_ROWS: dict[Phase, dict[type, Callable[[State, Any, float], Step]]] = {
    Phase.QUEUED: {**dict.fromkeys(_WITH_WORKERS, _drop), **_ALWAYS, Place: _place},
    Phase.RESERVING: {**_WITH_WORKERS, ReservedBy: _reserved},
    Phase.PREFILLING: _RUNNING,
    Phase.DECODING: _RUNNING,
    Phase.ENDED: dict.fromkeys(_WITH_WORKERS, _drop),
}
TABLE = {(phase, event): row for phase, rows in _ROWS.items() for event, row in rows.items()}
"""(phase, event type) -> what happens. Every pair is in it; a test walks them all."""
