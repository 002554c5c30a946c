"""How a request leaves its workers: for good, or for another placement. Pure rules of the lifecycle; knows no events.

A move: the attempt is raised, so that the old one can never emit again; every worker of it that may still hold
something gets an Abort; the request goes back to its old place in the queue, the tokens so far with it. The first move
is made at once, later ones wait longer; when the attempts are used up the client hears of it.
"""

from __future__ import annotations

from dataclasses import replace

from coordinator.events import Action, Cause, CheckBack, Fail, Finish, Loss, ReleasePlacement, Requeue, SendCommand
from coordinator.states import Phase, State, Tries
from kvrelay import errors
from kvrelay.requests import Role, WorkerId
from kvrelay.session import Abort

FIRST_RETRY_S = 0.02
LONGEST_RETRY_S = 1.0
CHECK_BACK_S = 1.0
"""How long decode may take to say whether all blocks of a prefill worker that is gone have landed."""

Step = tuple[State, list[Action]]


def move(state: State, loss: Loss, now: float) -> Step:
    """Another attempt on another placement; ABORTED when too many were lost."""
    tries = state.tries
    lost = tries.lost + 1
    if lost >= tries.limit:
        said = f"attempts used up ({lost}); the last one: {loss.words}"
        ended, actions = end(state, Fail(errors.Aborted(said, metadata={"worker": loss.worker}), loss))
        return replace(ended, tries=replace(tries, lost=lost)), actions
    return _anew(state, Tries(tries.limit, lost), Requeue(now + _back_off(lost - 1), loss))


def no_room(state: State, now: float) -> Step:
    """A worker was full: nothing was lost, so there is no bound but the deadline."""
    tries = state.tries
    requeue = Requeue(now + _back_off(tries.refused))
    return _anew(state, replace(tries, refused=tries.refused + 1), requeue)


def without(state: State, role: Role, loss: Loss, now: float) -> Step:
    """The worker of this role is out of the attempt. Prefill is not missed once all its blocks have landed.

    With token 0 in and no word of the blocks yet, decode is asked first: it says landed, or that the writer is lost.
    """
    if role is Role.DECODE or state.phase is not Phase.DECODING:
        return move(state, loss, now)
    if state.landed or state.in_doubt is not None:
        return state, []
    return replace(state, in_doubt=loss), [CheckBack(state.attempt, now + CHECK_BACK_S)]


def end(state: State, last: Finish | Fail) -> Step:
    """Tells every worker that may still hold something, gives the placement back, says the one last word."""
    return replace(state, phase=Phase.ENDED), [*_leave(state), last]


def lost(worker: WorkerId, role: Role) -> Loss:
    return Loss(Cause.LOST, worker, f"{role} worker {worker} was lost")


def _anew(state: State, tries: Tries, requeue: Requeue) -> Step:
    """What is known of the placement stays behind with it; tokens, text and order go on."""
    fresh = State(state.facts, attempt=state.attempt + 1, num_tokens=state.num_tokens, tries=tries)
    return fresh, [*_leave(state), requeue]


def _leave(state: State) -> list[Action]:
    """Decode first: its blocks are what others wait for. In RESERVING prefill has not heard of the attempt yet.

    One of n sequences ends alone; prefill, whose blocks the others may still need, has done its part for it.
    """
    if state.placement is None:
        return []
    fork = state.fork
    abort = Abort(state.facts.request_id, state.attempt)
    if fork is not None:
        abort = Abort(fork.request_id, fork.attempt, fork.sequence)
    actions: list[Action] = []
    decode, prefill = state.decoder(), state.prefiller()
    if decode is not None and not state.decode_ended:
        actions.append(SendCommand(decode, abort))
    if prefill is not None and not state.prefill_ended and state.phase is not Phase.RESERVING:
        actions.append(SendCommand(prefill, abort))
    return [*actions, ReleasePlacement(prefill, decode)]


def _back_off(times: int) -> float:
    """Seconds to wait after so many failures before."""
    return min(LONGEST_RETRY_S, FIRST_RETRY_S * 2.0 ** min(times, 16))
