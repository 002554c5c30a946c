"""The lifecycle table: every (phase, event) pair, and whole lives as scripts of events."""

from __future__ import annotations

from typing import get_args

import pytest
from support.lifecycles import EOS, OTHER, PLACED, RID, TICKET, D, P, facts, in_phase, play, work

from coordinator import events as ev
from coordinator.events import Emit, Fail, Finish, Placement, ReleasePlacement, Requeue, SendCommand
from coordinator.lifecycle import TABLE, accepts, step
from coordinator.states import Phase, State
from kvrelay import errors
from kvrelay.blocks import Ticket
from kvrelay.requests import FinishReason, WorkerId
from kvrelay.session import Abort, Destination, Prefill, Reserve, Start

EVERY_EVENT: dict[type, ev.Event] = {
    ev.Place: ev.Place(PLACED),
    ev.ReservedBy: ev.ReservedBy(D, 0, TICKET),
    ev.RefusedBy: ev.RefusedBy(D, 0, "InvalidArgument", "no", "tokens"),
    ev.TokenArrived: ev.TokenArrived(P, 0, 0, 65),
    ev.ForkArrived: ev.ForkArrived(P, 0, (65, 66)),
    ev.StopStringHit: ev.StopStringHit(P, 0, 0, 65),
    ev.LandedAt: ev.LandedAt(D, 0),
    ev.PushedBy: ev.PushedBy(P, 0),
    ev.WorkerEnded: ev.WorkerEnded(D, 0, "failed", "Internal", "boom"),
    ev.WorkerLost: ev.WorkerLost(D),
    ev.CheckBackDue: ev.CheckBackDue(0),
    ev.ClientGone: ev.ClientGone(),
    ev.DeadlinePassed: ev.DeadlinePassed(),
    ev.ReaderTooSlow: ev.ReaderTooSlow(),
    ev.StreamFailed: ev.StreamFailed(errors.Internal("x")),
}


def test_the_table_has_every_pair_of_phase_and_event() -> None:
    assert set(EVERY_EVENT) == set(get_args(ev.Event))
    assert set(TABLE) == {(phase, kind) for phase in Phase for kind in EVERY_EVENT}


E, Q, R, F, G = Phase.ENDED, Phase.QUEUED, Phase.RESERVING, Phase.PREFILLING, Phase.DECODING
NEXT_PHASE = {
    # event: QUEUED, RESERVING, PREFILLING, DECODING, ENDED
    ev.Place: (R, R, F, G, E),
    ev.ReservedBy: (Q, F, F, G, E),
    ev.RefusedBy: (Q, E, E, E, E),
    ev.TokenArrived: (Q, R, G, G, E),
    ev.ForkArrived: (Q, R, F, G, E),
    ev.StopStringHit: (Q, R, E, G, E),
    ev.LandedAt: (Q, R, F, G, E),
    ev.PushedBy: (Q, R, F, G, E),
    ev.WorkerEnded: (Q, E, E, E, E),
    ev.WorkerLost: (Q, Q, Q, Q, E),
    ev.CheckBackDue: (Q, R, F, G, E),
    ev.ClientGone: (E, E, E, E, E),
    ev.DeadlinePassed: (E, E, E, E, E),
    ev.ReaderTooSlow: (E, E, E, E, E),
    ev.StreamFailed: (E, E, E, E, E),
}


@pytest.mark.parametrize("kind", EVERY_EVENT)
@pytest.mark.parametrize("at", range(5))
def test_every_pair_leads_to_the_phase_in_the_table(kind: type, at: int) -> None:
    phase = (Q, R, F, G, E)[at]
    state = in_phase(phase)
    after, actions = step(state, EVERY_EVENT[kind], 10.0)
    assert after.phase is NEXT_PHASE[kind][at]
    ends = [a for a in actions if isinstance(a, Finish | Fail)]
    assert len(ends) == (1 if after.phase is E and phase is not E else 0)
    if phase is E:
        assert after == state
        assert all(isinstance(a, ev.Drop) for a in actions)
    if ends and phase is not Q:
        assert ReleasePlacement(P, D) in actions


def test_a_life_from_placement_to_the_last_token() -> None:
    state, actions = play(
        State(facts(max_tokens=3)),
        ev.Place(PLACED),
        ev.ReservedBy(D, 0, TICKET),
        ev.TokenArrived(P, 0, 0, 65),
        ev.LandedAt(D, 0),
        ev.PushedBy(P, 0),
        ev.WorkerEnded(P, 0, "length"),
        ev.TokenArrived(D, 0, 1, 66),
        ev.TokenArrived(D, 0, 2, 67),
    )
    assert actions == [
        SendCommand(D, Reserve(work(max_tokens=3))),
        SendCommand(P, Prefill(work(max_tokens=3), Destination(D, "127.0.0.1:7", TICKET))),
        Emit(0, 65),
        SendCommand(D, Start(RID, 0, (65,))),
        ReleasePlacement(P, None),
        Emit(1, 66),
        Emit(2, 67),
        ReleasePlacement(P, D),
        Finish(FinishReason.LENGTH),
    ]
    assert (state.phase, state.num_tokens, state.attempt) == (Phase.ENDED, 3, 0)


def test_max_tokens_1_reserves_nothing_and_never_touches_decode() -> None:
    state = State(facts(max_tokens=1))
    state, actions = play(state, ev.Place(Placement(P, None)), ev.TokenArrived(P, 0, 0, 65))
    assert actions == [
        SendCommand(P, Prefill(work(max_tokens=1), None)),
        Emit(0, 65),
        ReleasePlacement(P, None),
        Finish(FinishReason.LENGTH),
    ]


@pytest.mark.parametrize(
    "token", [ev.TokenArrived(P, 0, 0, EOS), ev.StopStringHit(P, 0, 0, 65)], ids=["eos", "stop string"]
)
def test_a_first_token_that_ends_the_request_aborts_decode_instead_of_starting_it(token: ev.Event) -> None:
    _, actions = play(in_phase(Phase.PREFILLING), token)
    assert actions == [
        Emit(0, getattr(token, "token_id", 0)),
        SendCommand(D, Abort(RID, 0)),
        SendCommand(P, Abort(RID, 0)),
        ReleasePlacement(P, D),
        Finish(FinishReason.STOP),
    ]


@pytest.mark.parametrize("before", [(), (ev.WorkerEnded(P, 0, "length"),)], ids=["not heard of it", "ended"])
def test_a_stop_string_on_decode_aborts_decode_alone_since_prefill_is_done(before: tuple[ev.Event, ...]) -> None:
    """Prefill may not have heard yet that its blocks landed: an abort would take the figures of the hand-off away."""
    _, actions = play(in_phase(Phase.DECODING), *before, ev.StopStringHit(D, 0, 1, 66))
    assert actions == [
        Emit(1, 66),
        SendCommand(D, Abort(RID, 0)),
        ReleasePlacement(P, D),
        Finish(FinishReason.STOP),
    ]


def test_stop_wins_over_length_on_one_index() -> None:
    _, actions = play(in_phase(Phase.DECODING, max_tokens=2), ev.TokenArrived(D, 0, 1, EOS))
    assert actions[-1] == Finish(FinishReason.STOP)
    _, actions = play(in_phase(Phase.DECODING, max_tokens=2), ev.StopStringHit(D, 0, 1, 66))
    assert actions[-1] == Finish(FinishReason.STOP)


@pytest.mark.parametrize(
    "token",
    [
        ev.TokenArrived(D, 1, 1, 66),
        ev.TokenArrived(D, 0, 0, 66),
        ev.TokenArrived(D, 0, 2, 66),
        ev.TokenArrived(P, 0, 1, 66),
        ev.TokenArrived(OTHER, 0, 1, 66),
    ],
    ids=["other attempt", "index again", "index too far", "not its turn", "not its worker"],
)
def test_a_token_that_is_not_the_next_one_is_dropped_and_counted(token: ev.TokenArrived) -> None:
    state = in_phase(Phase.DECODING)
    assert not accepts(state, token)
    assert step(state, token, 10.0) == (state, [ev.Drop("TokenArrived")])


def test_no_room_on_decode_goes_back_to_the_queue_with_a_growing_wait_and_a_new_attempt() -> None:
    state, waits = State(facts()), []
    for attempt in range(8):
        state, actions = play(state, ev.Place(PLACED), ev.RefusedBy(D, attempt, "ResourceExhausted", "full"))
        assert actions[0] == SendCommand(D, Reserve(work(attempt)))
        assert actions[1] == ReleasePlacement(P, D)
        assert isinstance(actions[2], Requeue)
        waits.append(round(actions[2].not_before - 10.0, 3))
        assert (state.phase, state.attempt, state.placement) == (Phase.QUEUED, attempt + 1, None)
    assert waits == [0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.0, 1.0]


def test_an_answer_to_an_older_attempt_changes_nothing() -> None:
    state, _ = play(State(facts()), ev.Place(PLACED), ev.RefusedBy(D, 0, "ResourceExhausted"), ev.Place(PLACED))
    for stale in (ev.ReservedBy(D, 0, TICKET), ev.RefusedBy(D, 0, "Internal"), ev.WorkerEnded(D, 0, "failed")):
        assert step(state, stale, 10.0) == (state, [ev.Drop(type(stale).__name__)])


def test_another_refusal_is_the_clients_answer_and_keeps_class_and_field() -> None:
    _, actions = play(in_phase(Phase.PREFILLING), ev.RefusedBy(P, 0, "InvalidArgument", "too long", "tokens.ids"))
    assert actions[:2] == [SendCommand(D, Abort(RID, 0)), ReleasePlacement(P, D)]
    assert isinstance(actions[2], Fail)
    assert (type(actions[2].error), actions[2].error.field) == (errors.InvalidArgument, "tokens.ids")


@pytest.mark.parametrize(
    ("phase", "worker", "told"),
    [(Phase.PREFILLING, P, [D]), (Phase.DECODING, D, [P])],
)
def test_a_worker_that_cannot_draw_a_token_ends_the_request_in_its_own_words(
    phase: Phase, worker: WorkerId, told: list[WorkerId]
) -> None:
    """Nobody else could draw it: nothing moves."""
    event = ev.WorkerEnded(worker, 0, "failed", "InvalidArgument", "the grammar allows no token")
    state, actions = play(in_phase(phase), event)
    assert state.phase is Phase.ENDED
    assert actions[:-1] == [*(SendCommand(w, Abort(RID, 0)) for w in told), ReleasePlacement(P, D)]
    assert isinstance(actions[-1], Fail)
    error = actions[-1].error
    assert (type(error), error.message) == (errors.InvalidArgument, "the grammar allows no token")


@pytest.mark.parametrize(
    ("phase", "aborted"),
    [(Phase.QUEUED, []), (Phase.RESERVING, [D]), (Phase.PREFILLING, [D, P]), (Phase.DECODING, [D, P])],
)
@pytest.mark.parametrize(
    ("event", "error"),
    [
        (ev.ClientGone(), errors.Cancelled),
        (ev.DeadlinePassed(), errors.DeadlineExceeded),
        (ev.ReaderTooSlow(), errors.ResourceExhausted),
        (ev.StreamFailed(errors.Internal("x")), errors.Internal),
    ],
)
def test_an_early_end_aborts_every_worker_that_heard_of_it(
    phase: Phase, aborted: list[WorkerId], event: ev.Event, error: type
) -> None:
    state, actions = play(in_phase(phase), event)
    assert [a.worker for a in actions if isinstance(a, SendCommand)] == aborted
    assert all(a.command == Abort(RID, 0) for a in actions if isinstance(a, SendCommand))
    assert isinstance(actions[-1], Fail)
    assert type(actions[-1].error) is error
    assert state.phase is Phase.ENDED


def test_landed_before_token_0_is_remembered() -> None:
    state, _ = play(in_phase(Phase.PREFILLING), ev.LandedAt(D, 0), ev.TokenArrived(P, 0, 0, 65))
    assert (state.phase, state.landed) == (Phase.DECODING, True)


def test_a_worker_that_ends_too_early_is_our_bug() -> None:
    for state, event in (
        (in_phase(Phase.PREFILLING), ev.WorkerEnded(P, 0, "length")),
        (in_phase(Phase.DECODING), ev.WorkerEnded(D, 0, "stop")),
    ):
        _, actions = play(state, event)
        assert isinstance(actions[-1], Fail)
        assert type(actions[-1].error) is errors.Internal


def test_workers_get_the_time_left_plus_a_second() -> None:
    _, actions = play(State(facts(deadline_at=12.5)), ev.Place(PLACED), now=10.0)
    assert actions == [SendCommand(D, Reserve(work(deadline_s=3.5)))]


def test_an_attempt_that_goes_on_sends_the_tokens_so_far() -> None:
    state = State(facts(), attempt=1, num_tokens=2)
    state, actions = play(state, ev.Place(PLACED, (65, 66)))
    assert isinstance(actions[0], SendCommand)
    assert isinstance(actions[0].command, Reserve)
    sent = actions[0].command.work
    assert (sent.attempt, sent.token_ids[-2:], sent.num_prompt_tokens, len(sent.token_ids)) == (1, (65, 66), 17, 19)
    state, actions = play(state, ev.ReservedBy(D, 1, TICKET), ev.TokenArrived(P, 1, 2, 67))
    assert actions[1:] == [Emit(2, 67), SendCommand(D, Start(RID, 1, (67,))), ReleasePlacement(P, None)]


def test_a_prompt_computed_by_decode_needs_no_prefill_worker_and_no_start() -> None:
    state, actions = play(State(facts()), ev.Place(Placement(None, D, "a")), ev.ReservedBy(D, 0, None))
    assert actions == [SendCommand(D, Reserve(work(), local_prefill=True))]
    state, actions = play(state, ev.TokenArrived(D, 0, 0, 65))
    assert (state.phase, actions) == (Phase.DECODING, [Emit(0, 65)])


def test_the_only_token_of_a_request_may_be_computed_by_decode_itself() -> None:
    script = (ev.Place(Placement(None, D, "a")), ev.ReservedBy(D, 0, None), ev.TokenArrived(D, 0, 0, 65))
    state, actions = play(State(facts(max_tokens=1)), *script)
    assert actions[1:] == [Emit(0, 65), ReleasePlacement(None, D), Finish(FinishReason.LENGTH)]
    assert step(state, ev.WorkerEnded(D, 0, "length"), 10.0)[1] == [ev.Drop("WorkerEnded")]


@pytest.mark.parametrize(("placement", "ticket"), [(PLACED, None), (Placement(None, D, "a"), TICKET)])
def test_a_worker_that_answers_another_kind_of_reserve_loses_the_attempt(
    placement: Placement, ticket: Ticket | None
) -> None:
    state, actions = play(State(facts()), ev.Place(placement), ev.ReservedBy(D, 0, ticket))
    assert (state.phase, state.attempt) == (Phase.QUEUED, 1)
    assert actions[1:3] == [SendCommand(D, Abort(RID, 0)), ReleasePlacement(placement.prefill, D)]
    assert isinstance(actions[3], Requeue)
    assert actions[3].loss is not None
    assert (actions[3].loss.cause, actions[3].loss.worker) == (ev.Cause.FAILED, D)


def test_an_error_name_that_we_do_not_know_is_internal() -> None:
    assert type(ev.error_named("LayoutMismatch", "m", worker=D)) is errors.LayoutMismatch
    assert type(ev.error_named("Strange", "m", worker=D)) is errors.Internal
    assert type(ev.error_named("annotations", "m", worker=D)) is errors.Internal
