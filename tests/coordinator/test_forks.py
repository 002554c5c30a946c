"""A request for n sequences, as scripts of events: one prompt, one Start, and then each sequence for itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.lifecycles import EOS, OTHER, PLACED, RID, TICKET, D, P, facts, play

from coordinator import events as ev
from coordinator.events import Emit, Fail, Finish, ForkOff, Placement, ReleasePlacement, Requeue, SendCommand
from coordinator.forks import child_of
from coordinator.lifecycle import accepts, step
from coordinator.states import ForkName, Phase, State
from kvrelay import errors
from kvrelay.requests import FinishReason, RequestId
from kvrelay.session import Abort, Prefill, Reserve, Start

N = 3
FIRST = (65, 66, 67)
TO_PREFILLING: tuple[ev.Event, ...] = (ev.Place(PLACED), ev.ReservedBy(D, 0, TICKET))
ALONE = Placement(None, D, "a")


def prompt(max_tokens: int = 4) -> State:
    return State(replace(facts(max_tokens), n=N))


def forked(first: tuple[int, ...] = FIRST) -> State:
    state, _ = play(prompt(), *TO_PREFILLING, ev.ForkArrived(P, 0, first))
    return state


def child(sequence: int, token: int = 65) -> State:
    """Sequence `sequence` with its first token in."""
    state, _ = play(child_of(forked(), sequence), ev.TokenArrived(P, 0, 0, token))
    assert (state.phase, state.num_tokens) == (Phase.DECODING, 1)
    return state


def test_the_work_of_the_prompt_says_n_and_one_start_has_all_first_tokens() -> None:
    state, actions = play(prompt(), *TO_PREFILLING, ev.LandedAt(D, 0), ev.ForkArrived(P, 0, FIRST))
    assert isinstance(actions[0], SendCommand) and isinstance(actions[0].command, Reserve)
    assert isinstance(actions[1], SendCommand) and isinstance(actions[1].command, Prefill)
    assert actions[0].command.work == actions[1].command.work
    assert (actions[0].command.work.n, actions[0].command.work.request_id) == (N, RID)
    assert actions[2:] == [SendCommand(D, Start(RID, 0, FIRST)), ReleasePlacement(P, D), ForkOff(P, FIRST)]
    assert (state.phase, child_of(state, 1).landed) == (Phase.ENDED, True)


@pytest.mark.parametrize(
    "event",
    [
        ev.ForkArrived(D, 0, FIRST),
        ev.ForkArrived(OTHER, 0, FIRST),
        ev.ForkArrived(P, 1, FIRST),
        ev.ForkArrived(P, 0, FIRST[:2]),
        ev.ForkArrived(P, 0, (*FIRST, 68)),
        ev.TokenArrived(P, 0, 0, 65),
        ev.StopStringHit(P, 0, 0, 65),
    ],
)
def test_what_is_not_all_first_tokens_from_the_worker_whose_turn_it_is_is_dropped(event: ev.Event) -> None:
    before, _ = play(prompt(), *TO_PREFILLING)
    assert step(before, event, 10.0) == (before, [ev.Drop(type(event).__name__)])


def test_a_request_for_one_sequence_never_forks() -> None:
    before, _ = play(State(facts()), *TO_PREFILLING)
    assert step(before, ev.ForkArrived(P, 0, (65,)), 10.0) == (before, [ev.Drop("ForkArrived")])


def test_a_prompt_that_decode_computes_forks_without_a_start() -> None:
    state, actions = play(prompt(), ev.Place(ALONE), ev.ReservedBy(D, 0, None), ev.ForkArrived(D, 0, FIRST))
    assert actions[1:] == [ReleasePlacement(None, D), ForkOff(D, FIRST)]
    one = child_of(state, 1)
    assert (one.phase, one.landed) == (Phase.DECODING, True)
    one, actions = play(one, ev.TokenArrived(D, 0, 0, 66), ev.TokenArrived(D, 0, 1, EOS))
    assert actions == [Emit(0, 66), Emit(1, EOS), ReleasePlacement(None, D), Finish(FinishReason.STOP)]


def test_one_token_each_needs_no_decode_worker() -> None:
    script = (ev.Place(Placement(P, None)), ev.ForkArrived(P, 0, FIRST))
    state, actions = play(prompt(max_tokens=1), *script)
    assert actions[1:] == [ReleasePlacement(P, None), ForkOff(P, FIRST)]
    _, actions = play(child_of(state, 2), ev.TokenArrived(P, 0, 0, 67), ev.WorkerEnded(P, 0, "length"))
    assert actions == [
        Emit(0, 67),
        ReleasePlacement(P, None),
        Finish(FinishReason.LENGTH),
        ev.Drop("WorkerEnded"),
    ]


def test_when_all_end_with_their_first_token_the_blocks_are_not_moved() -> None:
    _, actions = play(prompt(), *TO_PREFILLING, ev.ForkArrived(P, 0, (EOS,) * N))
    aborts = [SendCommand(D, Abort(RID, 0)), SendCommand(P, Abort(RID, 0))]
    assert actions[2:] == [*aborts, ReleasePlacement(P, D), ForkOff(P, (EOS,) * N)]


@pytest.mark.parametrize("lost", [P, D])
def test_a_prompt_that_loses_a_worker_moves_as_a_whole(lost: str) -> None:
    state, actions = play(prompt(), *TO_PREFILLING, ev.WorkerLost(lost))  # type: ignore[arg-type]  # a WorkerId
    assert (state.phase, state.attempt, state.facts.n) == (Phase.QUEUED, 1, N)
    other = D if lost == P else P
    assert SendCommand(other, Abort(RID, 0)) in actions
    state, actions = play(state, ev.ForkArrived(P, 0, FIRST), ev.Place(PLACED))
    assert actions[0] == ev.Drop("ForkArrived")
    assert isinstance(actions[1], SendCommand) and isinstance(actions[1].command, Reserve)
    assert (actions[1].command.work.n, actions[1].command.work.attempt) == (N, 1)


def test_a_sequence_is_a_request_of_its_own_with_the_placement_of_the_prompt() -> None:
    state = forked()
    for s in range(N):
        one = child_of(state, s)
        assert (one.facts.request_id, one.facts.n, one.facts.prompt_ids) == (f"{RID}.{s}", 1, state.facts.prompt_ids)
        assert one.facts.sampling == state.facts.sampling.of_sequence(s)
        assert (one.placement, one.attempt, one.fork) == (PLACED, 0, ForkName(RID, 0, s))
        assert accepts(one, ev.TokenArrived(P, 0, 0, 65))
    one, actions = play(child_of(state, 1), ev.TokenArrived(P, 0, 0, 66), ev.TokenArrived(D, 0, 1, 70))
    assert (actions, one.landed) == ([Emit(0, 66), Emit(1, 70)], True)


@pytest.mark.parametrize(
    ("event", "aborts"),
    [
        (ev.TokenArrived(P, 0, 0, EOS), []),
        (ev.StopStringHit(P, 0, 0, 65), [SendCommand(D, Abort(RID, 0, 1))]),
        (ev.StopStringHit(P, 0, 0, EOS), []),
    ],
)
def test_a_sequence_that_ends_with_its_first_token_is_aborted_only_if_decode_cannot_know(
    event: ev.TokenArrived | ev.StopStringHit, aborts: list[ev.Action]
) -> None:
    _, actions = play(child_of(forked(), 1), event)
    assert actions == [Emit(0, event.token_id), *aborts, ReleasePlacement(P, D), Finish(FinishReason.STOP)]


@pytest.mark.parametrize(
    ("event", "last"),
    [
        (ev.StopStringHit(D, 0, 1, 70), Finish(FinishReason.STOP)),
        (ev.ClientGone(), Fail),
        (ev.DeadlinePassed(), Fail),
        (ev.ReaderTooSlow(), Fail),
        (ev.StreamFailed(errors.Internal("x")), Fail),
    ],
)
def test_a_sequence_that_is_over_is_aborted_by_its_number_at_decode_alone(event: ev.Event, last: object) -> None:
    _, actions = play(child(2), event)
    sent = [a for a in actions if isinstance(a, SendCommand)]
    assert sent == [SendCommand(D, Abort(RID, 0, 2))]
    assert actions[-1] == last or isinstance(actions[-1], Fail)


def test_a_sequence_that_decode_ends_by_rule_is_aborted_by_nobody() -> None:
    _, actions = play(child(0), ev.TokenArrived(D, 0, 1, EOS))
    assert actions == [Emit(1, EOS), ReleasePlacement(P, D), Finish(FinishReason.STOP)]


def test_a_lost_decode_worker_makes_a_sequence_a_request_like_any_other() -> None:
    state, actions = play(child(1), ev.TokenArrived(D, 0, 1, 70), ev.WorkerLost(D))
    assert actions[1] == ReleasePlacement(P, D)
    assert isinstance(actions[2], Requeue)
    assert (state.fork, state.attempt, state.num_tokens, state.tries.lost) == (None, 1, 2, 1)
    name = RequestId(f"{RID}.1")
    state, actions = play(state, ev.Place(PLACED, (65, 70)), ev.ReservedBy(D, 1, TICKET))
    assert isinstance(actions[0], SendCommand) and isinstance(actions[0].command, Reserve)
    sent = actions[0].command.work
    assert (sent.request_id, sent.attempt, sent.n, sent.token_ids[-2:]) == (name, 1, 1, (65, 70))
    assert sent.sampling == facts().sampling.of_sequence(1)
    state, actions = play(state, ev.TokenArrived(P, 1, 2, 71))
    assert actions == [Emit(2, 71), SendCommand(D, Start(name, 1, (71,))), ReleasePlacement(P, None)]
    _, actions = play(state, ev.ClientGone())
    assert actions[:2] == [SendCommand(D, Abort(name, 1)), SendCommand(P, Abort(name, 1))]


def test_what_is_still_said_of_the_fork_after_a_sequence_moved_is_dropped() -> None:
    moved, _ = play(child(1), ev.WorkerLost(D))
    stale = (ev.TokenArrived(D, 0, 1, 70), ev.LandedAt(D, 0), ev.PushedBy(P, 0), ev.WorkerEnded(D, 0, "length"))
    for event in stale:
        assert step(moved, event, 10.0) == (moved, [ev.Drop(type(event).__name__)])


def test_decode_is_asked_before_a_sequence_is_given_up_with_its_prefill_worker() -> None:
    state, actions = play(child(1), ev.WorkerLost(P))
    assert actions == [ev.CheckBack(0, 11.0)]
    landed, actions = play(state, ev.LandedAt(D, 0), ev.CheckBackDue(0))
    assert (actions, landed.in_doubt) == ([ev.Drop("CheckBackDue")], None)
    moved, actions = play(state, ev.CheckBackDue(0))
    assert actions[0] == SendCommand(D, Abort(RID, 0, 1))
    assert (moved.fork, moved.attempt) == (None, 1)


def test_a_failed_ticket_moves_a_sequence_and_aborts_nobody() -> None:
    state, actions = play(child(1), ev.WorkerEnded(D, 0, "failed", "Unavailable", "the writer is lost"))
    assert [type(a) for a in actions] == [ReleasePlacement, Requeue]
    assert (state.phase, state.attempt) == (Phase.QUEUED, 1)
