"""From what the dispatcher kept of a request to its record: attempts, moves, and what was open at a loss."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.door import MODEL
from support.lifecycles import PLACED, D, P, facts

from coordinator.events import Cause, Loss, Placement
from coordinator.families import Families
from coordinator.live import Attempt, Live, Times
from coordinator.output import OutputText
from coordinator.states import Phase, State, Tries
from coordinator.stream import StreamBuffer
from coordinator.traces import outcome_of, trace_of
from kvrelay.requests import WorkerId
from kvrelay.session import ComputeRecord, Pushed
from kvrelay.telemetry.request_trace import Chunk, Interval

LOST_D = Loss(Cause.LOST, D, "decode worker d0 was lost")
SECOND = Placement(P, WorkerId("d1"), "a")


def a_live(num_tokens: int) -> Live:
    """Accepted at 100 s; token i at 101 + i s."""
    text = OutputText(MODEL.codec.detokenizer(), None, frozenset())
    live = Live(State(facts(9)), 1, text, StreamBuffer(1000), Times(100.0, 5), Attempt(100.0))
    for i in range(num_tokens):
        live.journal.append(i, 65, 101.0 + i)
    return live


def placed(attempt: Attempt, placement: Placement, at: float) -> None:
    attempt.placement = placement
    attempt.routed_at, attempt.placed_at, attempt.reserved_at, attempt.prefill_sent_at = at, at, at + 0.1, at + 0.1


def test_a_request_that_lost_decode_and_went_on_elsewhere() -> None:
    live = a_live(5)
    placed(live.attempt, PLACED, 100.5)
    live.state = State(facts(9), attempt=1, num_tokens=2, tries=Tries(lost=1))
    live.anew(LOST_D, 102.5)
    placed(live.attempt, SECOND, 102.6)
    live.state = State(facts(9), Phase.ENDED, 1, 5, SECOND, (65, 65))
    live.times.ended_at, live.outcome = 105.0, "stop"
    first, second = trace_of(live, "m", 200.0).attempts
    assert (first.token_offsets_s, first.decode, first.ended_s) == ((1.0, 2.0), Interval(1.0, 2.5), 2.5)
    assert (first.lost_worker, first.cause, first.migrated_s) == (D, "worker_lost", 3.0)
    assert (second.number, second.first_index, second.token_offsets_s) == (1, 2, (3.0, 4.0, 5.0))
    assert (second.queue, second.decode_worker) == (Interval(2.5, second.queue.end_s if second.queue else 0), "d1")
    assert (second.decode, second.lost_worker, second.migrated_s) == (Interval(3.0, 5.0), "", None)


def test_a_move_ends_with_the_next_loss_or_with_the_request_when_no_token_comes() -> None:
    live = a_live(0)
    placed(live.attempt, PLACED, 100.5)
    live.state = State(facts(9), attempt=1)
    live.anew(LOST_D, 101.0)
    placed(live.attempt, SECOND, 101.2)
    live.state = State(facts(9), attempt=2)
    live.anew(Loss(Cause.LOST, P, "p0 was lost"), 102.0)
    live.times.ended_at, live.outcome = 106.0, "Unavailable"
    first, second, third = trace_of(live, "m", 200.0).attempts
    assert (first.migrated_s, second.migrated_s, third.migrated_s) == (2.0, 6.0, None)
    assert (second.prefill, second.lost_worker) == (Interval(101.2 + 0.1 - 100.0, 2.0), P)
    assert (third.queue, third.place, third.prefill, third.decode) == (Interval(2.0, 6.0), None, None, None)


def test_an_attempt_that_found_no_room_leaves_no_trace_but_a_longer_queue() -> None:
    live = a_live(0)
    placed(live.attempt, PLACED, 100.5)
    live.state = State(facts(9), attempt=1)
    live.anew(None, 101.0)
    placed(live.attempt, SECOND, 103.0)
    live.times.ended_at = 104.0
    (only,) = trace_of(live, "m", 200.0).attempts
    assert (only.number, only.queue, only.decode_worker) == (1, Interval(0.0, 3.0), "d1")


def test_a_prompt_that_decode_computed_has_a_prefill_part_of_decode() -> None:
    live = a_live(3)
    placed(live.attempt, Placement(None, D, "a"), 100.5)
    live.attempt.prefill_sent_at = None
    live.attempt.prefill_record = ComputeRecord(live.id, 0, 0.1, 0.2, ((0.125, 0.25, 17),))
    live.state = State(facts(9), Phase.ENDED, 0, 3, live.attempt.placement)
    live.times.ended_at, live.outcome = 104.0, "stop"
    (only,) = trace_of(live, "m", 200.0).attempts
    assert (only.prefill_worker, only.decode_worker) == ("", D)
    assert (only.reserve, only.prefill) == (Interval(0.5, 100.6 - 100.0), Interval(100.6 - 100.0, 1.0))
    assert only.chunks == (Chunk(0.625, 0.875, 17),)
    assert (only.decode, only.push) == (Interval(1.0, 4.0), None)


@pytest.mark.parametrize(
    ("of_each", "outcome"),
    [
        (("Cancelled", "Internal", "stop"), "Internal"),
        (("stop", "Cancelled", "Unavailable"), "Unavailable"),
        (("stop", "", "length"), "Cancelled"),
        (("length", "stop", "stop"), "length"),
    ],
)
def test_a_request_of_sequences_ended_as_the_one_that_failed_and_not_as_those_that_were_cancelled_for_it(
    of_each: tuple[str, ...], outcome: str
) -> None:
    prompt = a_live(0)
    placed(prompt.attempt, PLACED, 100.25)
    prompt.state = State(replace(facts(9), n=3), Phase.ENDED, placement=PLACED)
    prompt.more_texts = (prompt.text, prompt.text)
    for child, how in zip(Families({}).found(prompt), of_each, strict=True):
        child.outcome = how
    assert outcome_of(prompt) == outcome


def test_sequences_have_what_came_before_the_fork_in_common_and_then_a_part_each() -> None:
    """The second one ends with its first token, the third loses decode; only the first hears of the hand-off."""
    prompt = a_live(0)
    placed(prompt.attempt, PLACED, 100.25)
    prompt.state = State(replace(facts(9), n=3), attempt=1)
    prompt.anew(LOST_D, 100.5)
    placed(prompt.attempt, PLACED, 100.5)
    prompt.state = State(replace(facts(9), n=3), Phase.ENDED, 1, placement=PLACED, tries=Tries(lost=1))
    prompt.more_texts = (prompt.text, prompt.text)
    one, two, three = Families({}).found(prompt)
    for child, count in ((one, 3), (two, 1), (three, 2)):
        for i in range(count):
            child.journal.append(i, 65, 101.0 + i)
        child.state = replace(child.state, phase=Phase.ENDED, num_tokens=count)
    one.attempt.landed_at, one.attempt.pushed = 101.5, Pushed(prompt.id, 1, "nixl", 2, 64, 1, 0.25, 0.5)
    one.times.ended_at, one.outcome = 103.0, "length"
    two.times.ended_at, two.outcome = 101.0, "stop"
    three.state = replace(three.state, fork=None, attempt=2)
    three.anew(LOST_D, 102.5)
    three.times.ended_at, three.outcome = 106.0, "Unavailable"
    record = trace_of(prompt, "m", 200.0)
    assert (record.request_id, record.outcome) == (prompt.id, "Unavailable")
    before, common, of_one, of_two, of_three, again = record.attempts
    assert (before.number, before.sequence, before.cause) == (0, None, "worker_lost")
    assert (common.number, common.sequence, common.prefill) == (1, None, Interval(100.6 - 100.0, 1.0))
    assert (common.push, common.num_bytes, common.decode) == (Interval(1.25, 1.5), 64, None)
    assert common.token_offsets_s == ()
    own = [(a.number, a.sequence, a.token_offsets_s, a.decode) for a in (of_one, of_two, of_three, again)]
    assert own == [
        (1, 0, (1.0, 2.0, 3.0), Interval(1.0, 3.0)),
        (1, 1, (1.0,), None),
        (1, 2, (1.0, 2.0), Interval(1.0, 2.5)),
        (2, 2, (), None),
    ]
    assert all((a.queue, a.prefill, a.push) == (None, None, None) for a in (of_one, of_two, of_three))
    assert (of_three.lost_worker, of_three.migrated_s, again.queue) == (D, 6.0, Interval(2.5, 6.0))
