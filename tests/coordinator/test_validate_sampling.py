"""Bad wishes of how to draw, to end and to constrain: refused by name, and at once however many they are."""

from __future__ import annotations

import time
from typing import Any

import pytest

from coordinator.constraints import Constraint, ConstraintKind
from coordinator.validate import Limits, RawRequest, check, check_length, fit, sampling_of
from kvrelay import errors
from kvrelay.requests import Sampling, StopRule

VOCAB = 258
LIMITS = Limits("m", vocab_size=VOCAB, context_limit=100, eos_token_ids=(256,), has_chat_template=True)
OK: dict[str, Any] = {"token_ids": (1, 2)}
NAN, INF = float("nan"), float("inf")
REGEX = Constraint(ConstraintKind.REGEX, "a+")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        *(({"min_p": p}, "sampling.min_p") for p in (-0.1, 1.1, NAN, INF, -INF, 10**400)),
        *(({"repetition_penalty": p}, "sampling.repetition_penalty") for p in (0.0, -1.0, 100.5, NAN, INF)),
        *(({"presence_penalty": p}, "sampling.presence_penalty") for p in (-2.1, 2.1, NAN, -INF)),
        *(({"frequency_penalty": p}, "sampling.frequency_penalty") for p in (-2.1, 2.1, NAN, INF)),
        *(({"seed": s}, "sampling.seed") for s in (-1, 2**64, 10**400)),
        *(({"logprobs": n}, "sampling.logprobs") for n in (-1, 21, VOCAB, 10**9)),
        *(({"logit_bias": ((5, 1.0), (i, 1.0))}, f"sampling.logit_bias[{i}]") for i in (VOCAB, -1, 2**40)),
        *(({"logit_bias": ((7, v),)}, "sampling.logit_bias[7]") for v in (NAN, INF, -INF, 1e38, 100.5, -100.5)),
        ({"logit_bias": tuple((i, 1.0) for i in range(1025))}, "sampling.logit_bias"),
        *(({"min_tokens": n}, "min_tokens") for n in (-1, -(2**63))),
        ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
        *(({"truncate_prompt": n}, "truncate_prompt") for n in (0, -1, -(2**63))),
        ({"token_ids": (1, 999, 2, 999), "truncate_prompt": 3}, "tokens.ids[1]"),
        ({"token_ids": (1, 999, 2, 999), "truncate_prompt": 2}, "tokens.ids[3]"),
        ({"token_ids": (1, 999), "left_out": 10}, "tokens.ids[11]"),
        ({"token_ids": (1,) * 200, "truncate_prompt": 100}, "tokens.ids"),
        *(({"constraint": Constraint(kind)}, kind.value) for kind in ConstraintKind if kind != ConstraintKind.CHOICE),
        ({"constraint": Constraint(ConstraintKind.CHOICE)}, "choice.texts"),
        ({"constraint": Constraint(ConstraintKind.CHOICE, choices=("a", ""))}, "choice.texts[1]"),
        ({"constraint": Constraint(ConstraintKind.LARK, "é" * 32769)}, "lark"),
        ({"constraint": Constraint(ConstraintKind.CHOICE, choices=("x" * 40000, "y" * 40000))}, "choice.texts"),
        ({"constraint": REGEX, "ignore_eos": True}, "ignore_eos"),
        *(({"constraint": Constraint(ConstraintKind.REGEX, "\ud800")}, "regex"),),
        ({"token_ids": None, "text": "ab\ud800"}, "text"),
        ({"stop": ("a\udc00",)}, "stop[0]"),
        ({"cache_salt": "\ud800"}, "cache_salt"),
        ({"client_request_id": "\ud800"}, "client_request_id"),
        ({"token_ids": None, "chat": ({"role": 5, "content": "x"},)}, "chat.messages[0].role"),
        ({"token_ids": None, "chat": ({"content": "x"},)}, "chat.messages[0].role"),
        ({"token_ids": None, "chat": ({"role": "user", "content": "x"},) * 8193}, "chat.messages"),
    ],
)
def test_a_bad_wish_is_refused_by_name_and_in_few_words(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(errors.InvalidArgument) as info:
        check(RawRequest(**{**OK, **changes}), LIMITS)
    assert info.value.field == field
    assert info.value.message.startswith(f"{field}: ")
    assert len(info.value.message) < 300


@pytest.mark.parametrize(
    "changes",
    [
        {"min_p": 0.0, "repetition_penalty": 1e-9, "presence_penalty": -2.0, "frequency_penalty": -2},
        {"min_p": 1.0, "repetition_penalty": 100.0, "presence_penalty": 2, "frequency_penalty": 2.0},
        {"seed": 0, "logprobs": 0},
        {"seed": 2**64 - 1, "logprobs": 20},
        {"logit_bias": tuple((i % VOCAB, -100.0) for i in range(1024))},
        {"logit_bias": ((0, 100.0), (VOCAB - 1, 100))},
        {"min_tokens": 0},
        {"min_tokens": 5, "max_tokens": 5},
        {"truncate_prompt": 1},
        {"truncate_prompt": 2**63 - 1},
        {"token_ids": (999, -1, *((1,) * 99)), "truncate_prompt": 99},
        {"constraint": REGEX, "stop": ("a",), "stop_token_ids": (5,), "min_tokens": 3},
        {"constraint": Constraint(ConstraintKind.LARK, "é" * 32768)},
        {"token_ids": None, "text": "naïve 👩"},
        {"token_ids": None, "chat": ({"role": "tool"}, {"role": "assistant", "content": None})},
    ],
)
def test_wishes_at_the_edge_pass(changes: dict[str, Any]) -> None:
    check(RawRequest(**{**OK, **changes}), LIMITS)


def test_a_hundred_thousand_biases_are_refused_in_no_time() -> None:
    raw = RawRequest(**OK, logit_bias=tuple((i, float("nan")) for i in range(100_000)))
    took = []
    for _ in range(5):
        began = time.perf_counter()
        with pytest.raises(errors.InvalidArgument, match="at most 1024 entries, not 100000"):
            check(raw, LIMITS)
        took.append(time.perf_counter() - began)
    assert min(took) < 0.1


def test_a_strangers_long_words_are_not_repeated_to_him() -> None:
    with pytest.raises(errors.NotFound) as info:
        check(RawRequest(**OK, model="x" * 1_000_000), LIMITS)
    assert len(info.value.message) < 300


def test_min_tokens_must_fit_the_context_too() -> None:
    assert fit(RawRequest(**OK, min_tokens=60), 40, LIMITS) == StopRule(60, frozenset({256}), 60)
    assert fit(RawRequest(**OK, max_tokens=7, min_tokens=7), 40, LIMITS) == StopRule(7, frozenset({256}), 7)
    with pytest.raises(errors.InvalidArgument, match=r"0 \.\. 60 \(context 100 - prompt 40\), not 61") as info:
        fit(RawRequest(**OK, min_tokens=61), 40, LIMITS)
    assert info.value.field == "min_tokens"


def test_a_text_that_will_be_truncated_may_be_of_any_length() -> None:
    check_length(RawRequest(text="x", truncate_prompt=5), "x" * 10_000, 7, LIMITS)


def test_all_that_was_wished_for_is_in_the_sampling_and_the_rest_is_off() -> None:
    assert sampling_of(RawRequest(**OK), 77, LIMITS) == Sampling(seed=77)
    raw = RawRequest(
        **OK,
        min_p=0.25,
        repetition_penalty=1.5,
        presence_penalty=-1.0,
        frequency_penalty=2.0,
        logit_bias=((7, 1.0), (3, -100.0), (7, 5.0)),
        logprobs=0,
        seed=1,
    )
    expected = Sampling(
        min_p=0.25,
        repetition_penalty=1.5,
        presence_penalty=-1.0,
        frequency_penalty=2.0,
        logit_bias=((3, -100.0), (7, 5.0)),
        logprobs=0,
        seed=1,
        grammar="{}",
    )
    assert sampling_of(raw, 77, LIMITS, "{}") == expected
