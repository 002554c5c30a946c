"""The lifecycle table: every (phase, event) pair, and whole lives as scripts of events."""

from __future__ import annotations

from typing import get_args

import pytest

from coordinator import events as ev
from coordinator.events import Cause, Emit, Fail, Finish, Loss, Placement, ReleasePlacement, Requeue, SendCommand
from coordinator.lifecycle import TABLE, accepts, step
from coordinator.states import Phase, RequestFacts, State, Tries
from kvrelay import errors
from kvrelay.blocks import BlockTable, Ticket
from kvrelay.requests import FinishReason, Incarnation, RequestId, Sampling, StopRule, WorkerId
from kvrelay.session import Abort, Destination, Prefill, Reserve, Start, Work

RID = RequestId("r1")
P, D, OTHER = WorkerId("p0"), WorkerId("d0"), WorkerId("x9")
EOS = 256
TICKET = Ticket(Incarnation("d-life"), 7, BlockTable(0, 16, (3, 4), 18))
PLACED = Placement(P, D, "127.0.0.1:7")


def facts(max_tokens: int = 4, stop_ids: tuple[int, ...] = (EOS,), deadline_at: float | None = None) -> RequestFacts:
    rule = StopRule(max_tokens, frozenset(stop_ids))
    return RequestFacts(RID, tuple(range(17)), Sampling(seed=5), rule, deadline_at=deadline_at)


def work(attempt: int = 0, max_tokens: int = 4, deadline_s: float | None = None) -> Work:
    rule = StopRule(max_tokens, frozenset({EOS}))
    return Work(RID, attempt, tuple(range(17)), 17, Sampling(seed=5), rule, deadline_s=deadline_s)


def play(state: State, *events: ev.Event, now: float = 10.0) -> tuple[State, list[ev.Action]]:
    actions: list[ev.Action] = []
    for event in events:
        state, more = step(state, event, now)
        actions += more
    return state, actions


def in_phase(phase: Phase, max_tokens: int = 4) -> State:
    script: dict[Phase, list[ev.Event]] = {
        Phase.QUEUED: [],
        Phase.RESERVING: [ev.Place(PLACED)],
        Phase.PREFILLING: [ev.Place(PLACED), ev.ReservedBy(D, 0, TICKET)],
        Phase.DECODING: [ev.Place(PLACED), ev.ReservedBy(D, 0, TICKET), ev.TokenArrived(P, 0, 0, 65)],
        Phase.ENDED: [ev.Place(PLACED), ev.ReservedBy(D, 0, TICKET), ev.ClientGone()],
    }
    state, _ = play(State(facts(max_tokens)), *script[phase])
    assert state.phase is phase
    return state


EVERY_EVENT: dict[type, ev.Event] = {
    ev.Place: ev.Place(PLACED),
    ev.ReservedBy: ev.ReservedBy(D, 0, TICKET),
    ev.RefusedBy: ev.RefusedBy(D, 0, "InvalidArgument", "no", "tokens"),
    ev.TokenArrived: ev.TokenArrived(P, 0, 0, 65),
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


def test_a_worker_that_is_about_to_go_sends_the_request_elsewhere_and_that_counts_as_lost() -> None:
    state, waits = State(facts(), tries=Tries(4)), []
    for attempt in range(3):
        state, actions = play(state, ev.Place(PLACED), ev.RefusedBy(D, attempt, "Unavailable", "draining"))
        assert actions[1:-1] == [ReleasePlacement(P, D)]
        assert isinstance(actions[-1], Requeue)
        words = "decode worker d0 did not take it: draining"
        assert actions[-1].loss == Loss(Cause.NOT_TAKEN, D, words)
        waits.append(round(actions[-1].not_before - 10.0, 3))
    assert waits == [0.02, 0.04, 0.08]
    state, actions = play(state, ev.Place(PLACED), ev.RefusedBy(D, 3, "Unavailable", "draining"))
    assert isinstance(actions[-1], Fail)
    assert type(actions[-1].error) is errors.Aborted
    assert actions[-1].error.message == f"attempts used up (4); the last one: {words}"


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


LOST = {P: Loss(Cause.LOST, P, "prefill worker p0 was lost"), D: Loss(Cause.LOST, D, "decode worker d0 was lost")}


@pytest.mark.parametrize(
    ("phase", "lost", "aborted"),
    [
        (Phase.RESERVING, P, [D]),
        (Phase.RESERVING, D, []),
        (Phase.PREFILLING, P, [D]),
        (Phase.PREFILLING, D, [P]),
        (Phase.DECODING, D, [P]),
    ],
)
def test_a_lost_worker_moves_the_request_in_every_phase(phase: Phase, lost: WorkerId, aborted: list[WorkerId]) -> None:
    before = in_phase(phase)
    state, actions = play(before, ev.WorkerLost(lost))
    assert actions == [
        *(SendCommand(worker, Abort(RID, 0)) for worker in aborted),
        ReleasePlacement(P, D),
        Requeue(10.02, LOST[lost]),
    ]
    assert state == State(facts(), attempt=1, num_tokens=before.num_tokens, tries=Tries(lost=1))


def test_decode_lost_after_prefill_has_ended_aborts_nobody() -> None:
    state, _ = play(in_phase(Phase.DECODING), ev.WorkerEnded(P, 0, "length"))
    state, actions = play(state, ev.WorkerLost(D))
    assert actions == [ReleasePlacement(P, D), Requeue(10.02, LOST[D])]


def test_what_the_old_attempt_still_says_is_dropped_also_on_the_same_workers() -> None:
    state, _ = play(in_phase(Phase.DECODING), ev.WorkerLost(D), ev.Place(PLACED, (65,)))
    state, _ = play(state, ev.ReservedBy(D, 1, TICKET), ev.TokenArrived(P, 1, 1, 66))
    stale: list[ev.Event] = [ev.LandedAt(D, 0), ev.PushedBy(P, 0), ev.ReservedBy(D, 0, TICKET), ev.CheckBackDue(0)]
    stale += [ev.WorkerEnded(w, 0, reason, "Unavailable") for w in (P, D) for reason in ("length", "failed", "aborted")]
    stale += [ev.RefusedBy(w, 0, "Internal") for w in (P, D)]
    stale += [kind(w, 0, 2, 67) for w in (P, D) for kind in (ev.TokenArrived, ev.StopStringHit)]
    for event in stale:
        assert step(state, event, 10.0) == (state, [ev.Drop(type(event).__name__)])
        assert not isinstance(event, ev.TokenArrived) or not accepts(state, event)
    assert accepts(state, ev.TokenArrived(D, 1, 2, 67))


def test_a_moved_request_goes_on_where_it_was_and_ends_by_its_own_limit() -> None:
    state, _ = play(in_phase(Phase.DECODING, max_tokens=4), ev.TokenArrived(D, 0, 1, 66), ev.WorkerLost(D))
    other = Placement(P, OTHER, "127.0.0.1:8")
    sent = Work(RID, 1, (*range(17), 65, 66), 17, Sampling(seed=5), StopRule(4, frozenset({EOS})))
    state, actions = play(
        state,
        ev.Place(other, (65, 66)),
        ev.ReservedBy(OTHER, 1, TICKET),
        ev.TokenArrived(P, 1, 2, 67),
        ev.TokenArrived(OTHER, 1, 3, 68),
    )
    assert actions == [
        SendCommand(OTHER, Reserve(sent)),
        SendCommand(P, Prefill(sent, Destination(OTHER, "127.0.0.1:8", TICKET))),
        Emit(2, 67),
        SendCommand(OTHER, Start(RID, 1, (67,))),
        ReleasePlacement(P, None),
        Emit(3, 68),
        ReleasePlacement(P, OTHER),
        Finish(FinishReason.LENGTH),
    ]
    assert state.tries.lost == 1


@pytest.mark.parametrize(("reason", "code"), [("failed", "Unavailable"), ("failed", "Aborted"), ("aborted", "")])
@pytest.mark.parametrize("phase", [Phase.RESERVING, Phase.PREFILLING, Phase.DECODING])
def test_decode_that_gives_up_moves_the_request(phase: Phase, reason: str, code: str) -> None:
    state, actions = play(in_phase(phase), ev.WorkerEnded(D, 0, reason, code, "so"))
    assert (state.phase, state.attempt) == (Phase.QUEUED, 1)
    assert [a.worker for a in actions if isinstance(a, SendCommand)] == ([] if phase is Phase.RESERVING else [P])
    assert isinstance(actions[-1], Requeue)
    assert actions[-1].loss is not None
    assert actions[-1].loss.cause is (Cause.GAVE_UP if reason == "aborted" else Cause.FAILED)


@pytest.mark.parametrize("code", ["Internal", "InvalidArgument", "DeadlineExceeded", "FailedPrecondition", "Strange"])
def test_an_end_that_trying_again_would_not_mend_is_the_clients_answer_at_once(code: str) -> None:
    for phase, worker in ((Phase.PREFILLING, P), (Phase.DECODING, D), (Phase.DECODING, P)):
        state, actions = play(in_phase(phase), ev.WorkerEnded(worker, 0, "failed", code, "so"))
        assert state.phase is Phase.ENDED
        assert isinstance(actions[-1], Fail)
        assert type(actions[-1].error) is getattr(errors, code, errors.Internal)


def test_moves_are_bounded_and_each_waits_longer() -> None:
    state, waits = State(facts(), tries=Tries(9)), []
    for attempt in range(8):
        state, actions = play(state, ev.Place(PLACED), ev.WorkerLost(D))
        assert isinstance(actions[-1], Requeue)
        waits.append(round(actions[-1].not_before - 10.0, 3))
        assert state.attempt == attempt + 1
    assert waits == [0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.0, 1.0]
    state, actions = play(state, ev.Place(PLACED), ev.WorkerLost(D))
    assert actions[1] == ReleasePlacement(P, D)
    assert isinstance(actions[2], Fail)
    assert (type(actions[2].error), actions[2].loss) == (errors.Aborted, LOST[D])
    assert actions[2].error.message == "attempts used up (9); the last one: decode worker d0 was lost"
    assert (state.phase, state.tries.lost) == (Phase.ENDED, 9)


def test_refusals_for_want_of_room_use_up_no_attempt() -> None:
    state = State(facts(), tries=Tries(2))
    for attempt in range(20):
        state, _ = play(state, ev.Place(PLACED), ev.RefusedBy(D, attempt, "ResourceExhausted", "full"))
    assert (state.phase, state.tries.lost) == (Phase.QUEUED, 0)
    state, actions = play(state, ev.Place(PLACED), ev.WorkerLost(D))
    assert actions[-1] == Requeue(10.02, LOST[D])
    assert state.tries.refused == 0


LANDED_PROOFS = [ev.LandedAt(D, 0), ev.TokenArrived(D, 0, 1, 66), ev.PushedBy(P, 0), ev.WorkerEnded(P, 0, "length")]


@pytest.mark.parametrize("proof", LANDED_PROOFS, ids=lambda proof: type(proof).__name__)
@pytest.mark.parametrize("end", [ev.WorkerLost(P), ev.WorkerEnded(P, 0, "failed", "Unavailable", "x")])
def test_a_prefill_worker_that_goes_after_landed_is_not_missed(proof: ev.Event, end: ev.Event) -> None:
    state, _ = play(in_phase(Phase.DECODING), proof)
    state, actions = play(state, end)
    assert (state.phase, state.attempt, actions) == (Phase.DECODING, 0, [])


GONE = [
    (ev.WorkerLost(P), LOST[P]),
    (
        ev.WorkerEnded(P, 0, "failed", "Unavailable", "link lost"),
        Loss(Cause.FAILED, P, "prefill worker p0: link lost (hand-off to decode worker d0)"),
    ),
]


@pytest.mark.parametrize(("gone", "loss"), GONE)
def test_decode_is_asked_first_when_prefill_went_after_its_token(gone: ev.Event, loss: Loss) -> None:
    state, actions = play(in_phase(Phase.DECODING), gone)
    assert (state.phase, actions) == (Phase.DECODING, [ev.CheckBack(0, 11.0)])
    for proof in (ev.LandedAt(D, 0), ev.TokenArrived(D, 0, 1, 66)):
        after, _ = play(state, proof)
        assert (after.in_doubt, after.landed) == (None, True)
        assert step(after, ev.CheckBackDue(0), 11.0) == (after, [ev.Drop("CheckBackDue")])
    moved, actions = play(state, ev.CheckBackDue(0), now=11.0)
    assert actions == [SendCommand(D, Abort(RID, 0)), ReleasePlacement(P, D), Requeue(11.02, loss)]
    assert (moved.phase, moved.attempt, moved.in_doubt) == (Phase.QUEUED, 1, None)


def test_decode_that_says_its_writer_is_lost_moves_the_request_at_once() -> None:
    state, actions = play(
        in_phase(Phase.DECODING), ev.WorkerLost(P), ev.WorkerEnded(D, 0, "failed", "Unavailable", "the writer is gone")
    )
    words = "decode worker d0: the writer is gone (hand-off from prefill worker p0)"
    assert actions[1:] == [ReleasePlacement(P, D), Requeue(10.02, Loss(Cause.FAILED, D, words))]
    assert step(state, ev.CheckBackDue(0), 11.0) == (state, [ev.Drop("CheckBackDue")])


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
    state, actions = play(State(facts()), ev.Place(Placement(None, D, "a")), ev.ReservedBy(D, 0, TICKET))
    assert actions == [SendCommand(D, Reserve(work(), local_prefill=True))]
    state, actions = play(state, ev.TokenArrived(D, 0, 0, 65))
    assert (state.phase, actions) == (Phase.DECODING, [Emit(0, 65)])


def test_an_error_name_that_we_do_not_know_is_internal() -> None:
    assert type(ev.error_named("LayoutMismatch", "m")) is errors.LayoutMismatch
    assert type(ev.error_named("Strange", "m")) is errors.Internal
    assert type(ev.error_named("annotations", "m")) is errors.Internal
