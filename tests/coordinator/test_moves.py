"""Losing workers: what moves a request, what it takes along, what ends it, and when nothing was lost at all."""

from __future__ import annotations

import pytest
from support.lifecycles import EOS, OTHER, PLACED, RID, TICKET, D, P, facts, in_phase, play

from coordinator import events as ev
from coordinator.events import Cause, Emit, Fail, Finish, Loss, Placement, ReleasePlacement, Requeue, SendCommand
from coordinator.lifecycle import accepts, step
from coordinator.states import Phase, State, Tries
from kvrelay import errors
from kvrelay.requests import FinishReason, Sampling, StopRule, WorkerId
from kvrelay.session import Abort, Destination, Prefill, Reserve, Start, Work

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


@pytest.mark.parametrize("state", [State(facts(), attempt=1, num_tokens=1), State(facts(), tries=Tries(lost=1))])
def test_a_request_that_has_run_moves_when_the_worker_that_is_left_is_too_small(state: State) -> None:
    lost, attempt = state.tries.lost, state.attempt
    state, _ = play(state, ev.Place(PLACED, (65,) * state.num_tokens))
    state, actions = play(state, ev.RefusedBy(D, attempt, "InvalidArgument", "does not fit 9 blocks", "max_tokens"))
    loss = Loss(Cause.NOT_TAKEN, D, "decode worker d0 did not take it: does not fit 9 blocks")
    assert actions == [ReleasePlacement(P, D), Requeue(10.0 + 0.02 * (lost + 1), loss)]
    assert (state.phase, state.attempt, state.tries) == (Phase.QUEUED, attempt + 1, Tries(lost=lost + 1))


def test_a_request_that_no_worker_takes_ends_when_its_attempts_are_used_up() -> None:
    state, _ = play(State(facts(), attempt=3, num_tokens=1, tries=Tries(4, 3)), ev.Place(PLACED, (65,)))
    _, actions = play(state, ev.RefusedBy(D, 3, "InvalidArgument", "does not fit", "max_tokens"))
    (last,) = [action for action in actions if isinstance(action, Fail)]
    words = "attempts used up (4); the last one: decode worker d0 did not take it: does not fit"
    assert (type(last.error), last.error.message) == (errors.Aborted, words)


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


@pytest.mark.parametrize(
    ("reason", "code"),
    [("failed", "Unavailable"), ("failed", "Aborted"), ("failed", "DeadlineExceeded"), ("aborted", "")],
)
@pytest.mark.parametrize("phase", [Phase.RESERVING, Phase.PREFILLING, Phase.DECODING])
def test_decode_that_gives_up_moves_the_request(phase: Phase, reason: str, code: str) -> None:
    state, actions = play(in_phase(phase), ev.WorkerEnded(D, 0, reason, code, "so"))
    assert (state.phase, state.attempt) == (Phase.QUEUED, 1)
    assert [a.worker for a in actions if isinstance(a, SendCommand)] == ([] if phase is Phase.RESERVING else [P])
    assert isinstance(actions[-1], Requeue)
    assert actions[-1].loss is not None
    by_itself = reason == "aborted" or code == "DeadlineExceeded"
    assert actions[-1].loss.cause is (Cause.GAVE_UP if by_itself else Cause.FAILED)


@pytest.mark.parametrize("code", ["Internal", "InvalidArgument", "FailedPrecondition", "Strange"])
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
