"""What a plan says of a sequence's past: no more than its draws look at, whatever the length of the prompt."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest
from specs import key

from engine.penalties import penalize
from engine.plan import NOTHING, Past, SequenceSlice
from engine.sequence import SequenceState
from engine.token_ids import TokenIds
from kvrelay.requests import Sampling, SequenceSpec, StopRule

PROMPT = (7, 5, 7, 300, 5)
PRESENCE = Sampling(presence_penalty=0.5)
REPETITION = Sampling(repetition_penalty=1.5)
GRAMMAR = Sampling(grammar="x")


def state(sampling: Sampling, known: tuple[int, ...] = PROMPT, least: int = 0) -> SequenceState:
    """Of a sequence that has computed all but its last token."""
    spec = SequenceSpec(key("r"), known, len(PROMPT), sampling, StopRule(100, frozenset({1}), least))
    return SequenceState(spec, 0, tuple(range(10)), len(known) - 1, 160)


def rows_after(seq: SequenceState, *token_ids: int) -> SequenceSlice:
    """Of the step that draws the next token after these."""
    seq.known.extend(token_ids)
    seq.num_computed = len(seq.known) - 1
    return seq.rows(1, 16)


@pytest.mark.parametrize("sampling", [PRESENCE, Sampling(frequency_penalty=0.5), GRAMMAR])
def test_a_draw_that_the_prompt_does_not_matter_to_knows_none_of_it(sampling: Sampling) -> None:
    seq = state(sampling)
    assert rows_after(seq).past == Past()
    assert rows_after(seq, 9, 9, 5).past == Past(TokenIds.of([9, 9, 5]))


def test_repetition_knows_each_id_of_the_prompt_once_and_the_very_same_value_at_every_step() -> None:
    seq = state(REPETITION)
    first, second = rows_after(seq).past, rows_after(seq, 9, 7).past
    assert (first, second) == (
        Past(NOTHING, TokenIds.of([7, 5, 300])),
        Past(TokenIds.of([9, 7]), TokenIds.of([7, 5, 300])),
    )
    assert first is not None
    assert second is not None
    assert first.prompt is second.prompt


def test_what_an_earlier_attempt_drew_is_output_wherever_the_sequence_goes_on() -> None:
    here = state(REPETITION)
    stayed = rows_after(here, 9, 7, 9)
    moved = rows_after(state(REPETITION, (*PROMPT, 9, 7)), 9)
    assert (moved.past, moved.index) == (stayed.past, stayed.index)
    assert moved.past == Past(TokenIds.of([9, 7, 9]), TokenIds.of([7, 5, 300]))


def test_a_fork_has_an_output_of_its_own_and_the_prompt_in_common() -> None:
    seq = state(REPETITION)
    rows_after(seq)
    other = seq.fork(replace(seq.spec, key=key("r")), 1, tuple(range(10)), 160, 4)
    ours, theirs = rows_after(seq, 3, 3).past, rows_after(other, 2).past
    assert ours is not None
    assert theirs is not None
    assert (list(ours.output), list(theirs.output)) == ([3, 3], [4, 2])
    assert theirs.prompt is ours.prompt


def test_a_plan_keeps_its_past_while_the_sequence_goes_on_and_can_be_printed_and_read_back() -> None:
    seq = state(REPETITION, least=50)
    early = rows_after(seq, 9)
    copy = pickle.loads(pickle.dumps(early))
    rows_after(seq, 9, 9, 9)
    assert copy == early
    assert early.past == Past(TokenIds.of([9]), TokenIds.of([7, 5, 300]), frozenset({1}))
    assert repr(early.past) == "Past(output=TokenIds.of([9]), prompt=TokenIds.of([7, 5, 300]), banned=frozenset({1}))"
    assert eval(repr(early.past), {"Past": Past, "TokenIds": TokenIds}) == early.past


def test_a_floor_alone_looks_at_no_token() -> None:
    seq = state(Sampling(), least=2)
    assert rows_after(seq, 9).past == Past(banned=frozenset({1}))
    assert rows_after(seq, 9).past is None


def test_repeated_ids_of_a_prompt_change_nothing() -> None:
    once, often = (np.arange(400, dtype=np.float32) for _ in range(2))
    penalize(once, REPETITION, Past(TokenIds.of([9]), TokenIds.of([7, 5, 300])))
    penalize(often, REPETITION, Past(TokenIds.of([9]), TokenIds.of(PROMPT)))
    assert once.tolist() == often.tolist()
    assert once[[5, 7, 9, 300]].tolist() == [np.float32(i / 1.5) for i in (5, 7, 9, 300)]


def test_ids_are_read_as_they_were_written() -> None:
    ids = TokenIds.of(b"ab")
    assert (list(ids), len(ids), ids.after(1), ids.after(2), ids.after(9)) == ([97, 98], 2, [98], [], [])
    assert list(TokenIds.of([0, 2**32 - 1])) == [0, 2**32 - 1]
    assert (ids, hash(ids)) == (TokenIds.of((97, 98)), hash(TokenIds.of(iter([97, 98]))))
    assert (len(NOTHING), list(NOTHING), repr(NOTHING)) == (0, [], "TokenIds.of([])")
