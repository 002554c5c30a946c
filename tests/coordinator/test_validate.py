"""Bad requests: every error names its field."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.journal import Journal
from coordinator.validate import Limits, RawRequest, check, check_length, fit, sampling_of
from kvrelay import errors
from kvrelay.requests import Sampling, StopRule

LIMITS = Limits("m", vocab_size=258, context_limit=100, eos_token_ids=(256,), has_chat_template=True)
OK: dict[str, Any] = {"token_ids": (1, 2)}
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"token_ids": None}, "prompt"),
        ({"token_ids": ()}, "tokens.ids"),
        ({"token_ids": None, "text": ""}, "text"),
        ({"token_ids": None, "chat": ()}, "chat.messages"),
        (
            {"token_ids": None, "chat": ({"role": "user", "content": "x"}, {"role": "", "content": "y"})},
            "chat.messages[1].role",
        ),
        ({"token_ids": (0, 1, 2, -1)}, "tokens.ids[3]"),
        ({"token_ids": (258,)}, "tokens.ids[0]"),
        ({"token_ids": (0, 2**31)}, "tokens.ids[1]"),
        ({"token_ids": (-(2**63),)}, "tokens.ids[0]"),
        ({"temperature": NAN}, "sampling.temperature"),
        ({"temperature": INF}, "sampling.temperature"),
        ({"temperature": -1.0}, "sampling.temperature"),
        ({"temperature": 100.5}, "sampling.temperature"),
        ({"top_p": 0.0}, "sampling.top_p"),
        ({"top_p": 1.0001}, "sampling.top_p"),
        ({"top_p": NAN}, "sampling.top_p"),
        ({"top_p": -INF}, "sampling.top_p"),
        ({"top_k": -1}, "sampling.top_k"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"stop": ("a",) * 17}, "stop"),
        ({"stop": ("a", "")}, "stop[1]"),
        ({"stop": ("é" * 129,)}, "stop[0]"),
        ({"stop_token_ids": (5, 258)}, "stop_token_ids[1]"),
        ({"stop_token_ids": (5,) * 257}, "stop_token_ids"),
        ({"cache_salt": "x" * 257}, "cache_salt"),
        ({"client_request_id": "x" * 257}, "client_request_id"),
        ({"n": 0}, "n"),
    ],
)
def test_a_bad_field_is_refused_by_name(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(errors.InvalidArgument) as info:
        check(RawRequest(**{**OK, **changes}), LIMITS)
    assert info.value.field == field
    assert field in info.value.message


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model": "m"},
        {"temperature": 0.0},
        {"temperature": 100.0},
        {"temperature": 1e-30},
        {"top_p": 1e-9},
        {"top_k": 10**7},
        {"stop": ("é" * 128,) * 16},
        {"n": 1},
        {"token_ids": None, "chat": ({"role": "user", "content": ""},)},
        {"token_ids": (0, 257)},
    ],
)
def test_values_at_the_edge_pass(changes: dict[str, Any]) -> None:
    check(RawRequest(**{**OK, **changes}), LIMITS)


def test_an_unknown_model_is_not_found() -> None:
    with pytest.raises(errors.NotFound) as not_found:
        check(RawRequest(model="other", **OK), LIMITS)
    assert not_found.value.field == "model"


@pytest.mark.parametrize(("n", "good"), [(None, True), (1, True), (16, True), (0, False), (-1, False), (17, False)])
def test_a_prompt_has_1_to_16_sequences(n: int | None, good: bool) -> None:
    if good:
        return check(RawRequest(n=n, **OK), LIMITS)
    with pytest.raises(errors.InvalidArgument) as wrong:
        check(RawRequest(n=n, **OK), LIMITS)
    assert (wrong.value.field, str(wrong.value)) == ("n", f"n: must be 1 .. 16, not {n}")
    return None


def test_a_prompt_has_1_to_context_minus_1_tokens() -> None:
    assert fit(RawRequest(**OK), 99, LIMITS) == StopRule(1, frozenset({256}))
    assert fit(RawRequest(**OK, max_tokens=1), 99, LIMITS).max_tokens == 1
    for length in (0, 100, 101):
        with pytest.raises(errors.InvalidArgument) as info:
            fit(RawRequest(**OK), length, LIMITS)
        assert info.value.field == "tokens.ids"


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized() -> None:
    raw = RawRequest(text="x")
    check_length(raw, "x" * 700, 7, LIMITS)
    check_length(raw, "x" * 10_000, 0, LIMITS)
    with pytest.raises(errors.InvalidArgument) as info:
        check_length(raw, "x" * 701, 7, LIMITS)
    assert info.value.field == "text"


@pytest.mark.parametrize("length", [1, 99])
@pytest.mark.parametrize("more", [1, 100, 1000, 2**31 - 1, 2**63 - 1])
def test_more_output_than_the_context_holds_is_refused(length: int, more: int) -> None:
    room = 100 - length
    assert fit(RawRequest(**OK, max_tokens=room), length, LIMITS).max_tokens == room
    with pytest.raises(errors.InvalidArgument, match=rf"1 \.\. {room} \(context 100 - prompt {length}\)") as info:
        fit(RawRequest(**OK, max_tokens=room + more if more < 2**31 - 1 else more), length, LIMITS)
    assert info.value.field == "max_tokens"


def test_absent_fields_take_the_defaults() -> None:
    assert fit(RawRequest(**OK), 40, LIMITS) == StopRule(60, frozenset({256}))
    assert fit(RawRequest(**OK, ignore_eos=True, stop_token_ids=(7,)), 40, LIMITS) == StopRule(60, frozenset({7}))
    assert sampling_of(RawRequest(**OK), 77, LIMITS) == Sampling(1.0, 1.0, 0, 77)
    assert sampling_of(RawRequest(**OK, seed=0, top_k=10**7, temperature=1e-30), 77, LIMITS) == Sampling(0, 1.0, 258, 0)


def test_the_journal_takes_each_index_once_and_in_order() -> None:
    journal = Journal()
    journal.append(0, 65, 1.5)
    journal.append(1, 66, 1.75)
    for wrong in (1, 3):
        with pytest.raises(ValueError, match=f"token {wrong} cannot follow 2 tokens"):
            journal.append(wrong, 67, 2.0)
    assert (journal.token_ids, journal.times, len(journal)) == ((65, 66), (1.5, 1.75), 2)
