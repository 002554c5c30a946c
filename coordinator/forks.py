"""A request for n sequences becomes n requests: pure rules of the lifecycle. Knows no I/O and no text.

The prompt is computed once, for all of them, and so are the blocks moved. When the n first tokens are in, each sequence
gets a state of its own, with the placement and the attempt that it has in common with the others. The workers know it
by that attempt and its number (`State.fork`) until it ends or is moved; a move makes it a request like any other.
"""

from __future__ import annotations

from dataclasses import replace

from coordinator.events import Action, ForkArrived, ForkOff, ReleasePlacement, SendCommand
from coordinator.moves import Step
from coordinator.states import ForkName, Phase, RequestFacts, State
from kvrelay.requests import RequestId, WorkerId
from kvrelay.session import Abort, Start


def accepts_fork(state: State, event: ForkArrived) -> bool:
    """Whether `fork` may take these for the first tokens of the request's n sequences."""
    n = state.facts.n
    return n > 1 and len(event.token_ids) == n and expects_firsts(state, event.worker, event.attempt)


def expects_firsts(state: State, worker: WorkerId, attempt: int) -> bool:
    """Whether it is this worker's turn to say the first tokens."""
    placement = state.placement
    if placement is None or attempt != state.attempt:
        return False
    if state.phase is Phase.DECODING:
        return worker == placement.decode
    return state.phase is Phase.PREFILLING and worker == placement.prefill


def fork(state: State, event: ForkArrived) -> Step:
    """All first tokens are in: decode hears of them at once, and may run those that go on when the blocks landed.

    When all end by rule with these tokens nothing needs to be moved, and both workers get an Abort instead.
    """
    placement, request_id = state.placement, state.facts.request_id
    assert placement is not None
    actions: list[Action] = []
    if placement.prefill is not None and placement.decode is not None:
        if all(state.facts.stop.finish_of(0, token) is not None for token in event.token_ids):
            abort = Abort(request_id, state.attempt)
            actions = [SendCommand(placement.decode, abort), SendCommand(placement.prefill, abort)]
        else:
            actions = [SendCommand(placement.decode, Start(request_id, state.attempt, event.token_ids))]
    release = ReleasePlacement(placement.prefill, placement.decode)
    return replace(state, phase=Phase.ENDED), [*actions, release, ForkOff(event.worker, event.token_ids)]


def facts_of(facts: RequestFacts, sequence: int) -> RequestFacts:
    """What sequence 0, 1, ... is as a request of its own."""
    name = RequestId(f"{facts.request_id}.{sequence}")
    return replace(facts, request_id=name, sampling=facts.sampling.of_sequence(sequence), n=1)


def child_of(prompt: State, sequence: int) -> State:
    """The state of one sequence just before its first token; `prompt` is what `fork` returned."""
    placement = prompt.placement
    assert placement is not None
    return State(
        facts_of(prompt.facts, sequence),
        Phase.PREFILLING if placement.prefill is not None else Phase.DECODING,
        prompt.attempt,
        placement=placement,
        landed=prompt.landed,
        prefill_ended=True,
        decode_ended=placement.decode is None,
        tries=prompt.tries,
        fork=ForkName(prompt.facts.request_id, prompt.attempt, sequence),
    )
