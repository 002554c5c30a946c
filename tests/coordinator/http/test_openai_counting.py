"""Values of a JSON body, counted while it comes in parts of any size."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from coordinator.http.counting import MAX_PARTS, MAX_VALUES, Counting
from coordinator.http.errors import Rejected

TRICKY = ["a,b", "\\", '\\"', '"', '",[', "\\\\", "", "[{,", "é,\n", '\\",\\']


def counted(raw: bytes, cuts: list[int]) -> tuple[int, int]:
    counting = Counting()
    for begin, end in zip([0, *cuts], [*cuts, len(raw)], strict=True):
        counting.feed(raw[begin:end])
    return counting._values, counting._parts


def values_of(value: Any) -> tuple[int, int]:
    """Commas; and lists, objects and names; of a value as json writes it."""
    if not isinstance(value, list | dict):
        return 0, 0
    inner = [values_of(one) for one in (value.values() if isinstance(value, dict) else value)]
    return max(0, len(inner) - 1) + sum(c for c, _ in inner), 1 + sum(n for _, n in inner) + (
        len(value) if isinstance(value, dict) else 0
    )


def test_strings_count_for_nothing_wherever_the_body_is_cut() -> None:
    rng = random.Random(3)
    for _ in range(300):
        value = {
            text: rng.choice([text, [text, 1, [text]], {"x": text, text: rng.choice(TRICKY)}])
            for text in rng.sample(TRICKY, rng.randrange(1, 6))
        }
        raw = json.dumps(value, ensure_ascii=rng.random() < 0.5).encode()
        cuts = sorted(rng.randrange(len(raw) + 1) for _ in range(rng.randrange(8)))
        assert counted(raw, cuts) == values_of(value), (raw, cuts)


@pytest.mark.parametrize("value", [[1] * (MAX_VALUES + 2), [[1]] * (MAX_PARTS + 1), [{}] * (MAX_PARTS + 1)])
def test_too_much_is_refused(value: Any) -> None:
    with pytest.raises(Rejected) as refused:
        Counting().feed(json.dumps(value).encode())
    assert refused.value.meaning.status == 413


def test_a_long_text_is_not_much() -> None:
    Counting().feed(json.dumps({"prompt": "a, [b] {c}" * 700_000}).encode())
