"""What reshapes a row of logits before a token is drawn, in its order, and what is told about the token."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from reference_draws import drawn_from, reshaped, same, told
from specs import key

from engine.likelihood import logprobs_of
from engine.penalties import penalize
from engine.plan import Past
from engine.sampler import Draw, Drawn, Floats, GrammarFailed, sample
from engine.token_ids import TokenIds
from kvrelay.errors import Internal
from kvrelay.requests import Sampling

GREEDY = Sampling(temperature=0.0)
VOCAB = 40


def row_of(seed: int, vocab: int = VOCAB) -> Floats:
    return (np.random.default_rng(seed).standard_normal(vocab) * 3).astype(np.float32)


def past_of(prompt: Sequence[int], output: Sequence[int] = (), banned: frozenset[int] = frozenset()) -> Past:
    return Past(TokenIds.of(output), TokenIds.of(prompt), banned)


def draw(row: Floats, sampling: Sampling, past: Past | None = None, index: int = 0) -> Drawn:
    return sample(row[None], [Draw(sampling, index, past, key("r"))], Allowing({}))


class Allowing:
    """Grammars that are lists of the tokens they allow; one with a word in it fails with it."""

    def __init__(self, tokens: dict[str, list[int]]) -> None:
        self._tokens = tokens

    def disallow(self, row: Floats, draw: Draw) -> None:
        name = draw.sampling.grammar
        if name not in self._tokens:
            raise GrammarFailed(name)
        left = row[self._tokens[name]]
        row[:] = -np.inf
        row[self._tokens[name]] = left


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(0.0, repetition_penalty=1.3, presence_penalty=0.7, frequency_penalty=0.4),
        Sampling(0.0, repetition_penalty=1.3),
        Sampling(0.0, presence_penalty=-1.1),
        Sampling(0.0, frequency_penalty=2.0),
        Sampling(0.0, repetition_penalty=0.4, frequency_penalty=-0.3),
    ],
)
def test_penalties_are_those_of_the_reference_to_the_last_bit(sampling: Sampling) -> None:
    chance = random.Random(3)
    for seed in range(50):
        prompt = [chance.randrange(VOCAB) for _ in range(chance.randint(1, 12))]
        output = [chance.randrange(VOCAB) for _ in range(chance.randint(0, 12))]
        row = row_of(seed)
        expected = reshaped(row, sampling, prompt, output)
        penalize(row, sampling, past_of(prompt, output))
        assert row.tolist() == expected


def test_the_prompt_counts_for_repetition_alone_and_the_first_output_token_for_all() -> None:
    row = np.array([2.0, -2.0, 2.0, 2.0], np.float32)
    penalize(
        row, Sampling(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25), past_of((0, 1, 0), (2,))
    )
    assert row.tolist() == [1.0, -4.0, 1.0 - 0.75, 2.0]


@pytest.mark.parametrize("penalty", [1e-300, 1e-30, 100.0])
def test_no_penalty_makes_a_logit_infinite_that_was_not(penalty: float) -> None:
    row = np.array([3e38, 1.0, 0.0, -1.0, -np.inf], np.float32)
    penalize(row, Sampling(repetition_penalty=penalty), past_of((0, 1, 2, 3, 4)))
    assert not np.isnan(row).any()
    assert row.max() < np.inf
    assert row[4] == -np.inf


def test_a_bias_is_added_after_penalties() -> None:
    row = np.array([4.0, 3.0, 2.9], np.float32)
    sampling = Sampling(0.0, repetition_penalty=2.0, logit_bias=((2, 0.2), (1, -0.5)))
    assert draw(row, sampling, past_of((0,))).token_ids == (2,)
    assert draw(row, replace(sampling, logit_bias=((0, 1.2),)), past_of((0,))).token_ids == (0,)
    assert draw(row, replace(sampling, logit_bias=((1, 100.0),)), past_of((0,))).token_ids == (1,)


def test_a_banned_token_is_never_drawn_however_likely() -> None:
    row = np.array([9.0, 1.0, 0.5], np.float32)
    banned = Past(banned=frozenset({0}))
    assert draw(row, GREEDY, banned).token_ids == (1,)
    assert draw(row, Sampling(0.0, logit_bias=((0, 100.0),)), banned).token_ids == (1,)
    assert {draw(row, Sampling(seed=5), banned, i).token_ids[0] for i in range(200)} == {1, 2}
    assert draw(row, GREEDY, Past(banned=frozenset({0, 1, 2, 99}))).token_ids == (0,), "a ban of all bans nothing"


def test_the_grammar_wins_over_a_ban_that_leaves_it_nothing() -> None:
    grammars = Allowing({"one": [3], "two": [3, 4]})
    row = np.arange(8, dtype=np.float32)
    past = past_of((1, 2), banned=frozenset({3}))
    draws = [Draw(Sampling(0.0, grammar=name), 0, past, key(name)) for name in ("one", "two")]
    assert sample(np.stack([row, row]), draws, grammars) == Drawn((3, 4))


def test_a_grammar_that_allows_nothing_fails_its_own_draw_alone() -> None:
    row = row_of(1)
    sampling = Sampling(seed=2, grammar="nothing", logprobs=2)
    draws = [
        Draw(Sampling(seed=7), 3),
        Draw(sampling, 1, past_of((1,), (2,)), key("a")),
        Draw(replace(sampling, grammar="it is broken"), 1, past_of((1,), (2,)), key("b")),
        Draw(Sampling(seed=8), 4),
    ]
    drawn = sample(np.stack([row] * 4), draws, Allowing({"nothing": []}))
    assert drawn.failures == ((1, "the grammar allows no token at output index 1"), (2, "it is broken"))
    assert drawn.logprobs == ()
    for i in (0, 3):
        assert drawn.token_ids[i] == sample(row[None], [draws[i]]).token_ids[0]


def test_an_engine_without_grammars_says_so() -> None:
    draws = [Draw(Sampling(grammar="x"), 0, past_of((1,)), key("a"))]
    assert sample(row_of(1)[None], draws).failures == ((0, "this engine reads no grammars"),)


def test_a_model_gone_bad_is_still_an_error_of_the_whole_step() -> None:
    for bad in (math.nan, math.inf):
        rows = np.stack([row_of(1), row_of(2)])
        rows[1, 5] = bad
        with pytest.raises(Internal, match="logits are not finite"):
            sample(rows, [Draw(GREEDY, 0), Draw(Sampling(logprobs=1), 0)])


def test_min_p_keeps_what_is_that_likely_beside_the_best_after_temperature() -> None:
    row = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))

    def seen(sampling: Sampling) -> set[int]:
        return {draw(row, replace(sampling, seed=4), index=i).token_ids[0] for i in range(400)}

    assert seen(Sampling(min_p=0.2)) == {0, 1, 2}
    assert seen(Sampling(min_p=0.5)) == {0, 1}
    assert seen(Sampling(min_p=1.0)) == {0}
    assert seen(Sampling(temperature=0.5, min_p=0.2)) == {0, 1}, "0.3 squared is 0.36 of 0.5 squared, 0.15 is 0.09"
    assert seen(Sampling(min_p=0.2, top_k=2)) == {0, 1}
    assert seen(Sampling(min_p=0.2, top_p=0.5)) == {0}, "half of what min_p left"
    assert seen(Sampling(min_p=1e-300)) == {0, 1, 2, 3}


def test_logprobs_are_of_the_logits_before_all_else() -> None:
    for seed in range(30):
        row = row_of(seed)
        row[7] = row[9]
        past = past_of((1, 2), (3, 1), frozenset({int(row.argmax())}))
        sampling = Sampling(
            1.0, seed=seed, min_p=0.01, repetition_penalty=1.4, presence_penalty=0.3, logit_bias=((3, 2.0),), logprobs=6
        )
        drawn = draw(row, sampling, past, index=2)
        expected = drawn_from(reshaped(row, sampling, (1, 2), (3, 1), past.banned), sampling, 2)
        assert drawn.token_ids == (expected,)
        assert same(drawn.logprobs[0], told(row, expected, 6))


def test_the_likeliest_come_first_and_low_ids_on_ties_but_none_that_is_impossible() -> None:
    row = np.array([1.0, 3.0, 3.0, -np.inf, 2.0, 3.0], np.float32)
    assert [t for t, _ in logprobs_of(row, 0, 2).top] == [1, 2]
    assert [t for t, _ in logprobs_of(row, 0, 4).top] == [1, 2, 5, 4]
    assert [t for t, _ in logprobs_of(row, 0, 20).top] == [1, 2, 5, 4, 0]
    assert logprobs_of(row, 1, 0).top == ()
    assert logprobs_of(row, 1, 1).token == pytest.approx(3.0 - math.log(3 * math.e**3 + math.e**2 + math.e))


def test_logprobs_of_a_big_vocabulary_are_exact_to_a_millionth() -> None:
    row = row_of(3, 128_256)
    values = row.astype(np.float64)
    norm = values.max() + math.log(np.exp(values - values.max()).sum())
    found = logprobs_of(row, 77, 3)
    assert found.token == pytest.approx(values[77] - norm, abs=1e-6)
    assert [t for t, _ in found.top] == np.argsort(-row, kind="stable")[:3].tolist()
    extreme = np.array([3e38, -3e38], np.float32)
    assert logprobs_of(extreme, 0, 1).token == 0.0


def test_asking_for_logprobs_changes_no_token_and_is_told_beside_those_who_did_not_ask() -> None:
    rows = np.stack([row_of(i, 3000) for i in range(12)])
    plain = [Draw(Sampling(float(i % 3), 0.9 if i % 2 else 1.0, seed=i), i) for i in range(12)]
    asking = [
        draw._replace(sampling=replace(draw.sampling, logprobs=1)) if i in (2, 5) else draw
        for i, draw in enumerate(plain)
    ]
    drawn = sample(rows, asking)
    assert drawn.token_ids == sample(rows, plain).token_ids
    assert [i for i, one in enumerate(drawn.logprobs) if one is not None] == [2, 5]
    assert sample(rows, plain).logprobs == ()


def neighbours() -> list[Draw]:
    return [
        Draw(Sampling(1.0, 0.9, 20, seed=1), 3),
        Draw(GREEDY, 3),
        Draw(Sampling(1.0, seed=2, repetition_penalty=1.2, logprobs=3), 3, past_of((1, 2), (3,)), key("n")),
        Draw(Sampling(0.7, seed=3, min_p=0.1), 3),
    ]


SHAPES: list[Callable[[Floats], None]] = [
    lambda row: None,
    lambda row: row.__setitem__(slice(1, None), -np.inf),
    lambda row: row.fill(0.0),
    lambda row: row.__setitem__(5, 3e38),
]


@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1e-5, 1e-4, 1.0, 100.0, 1e300])
@pytest.mark.parametrize("top_k", [0, 1, VOCAB, VOCAB + 1, 10**7])
def test_at_the_edges_a_draw_gives_a_token_that_is_possible_and_its_neighbours_what_they_had(
    temperature: float, top_k: int
) -> None:
    base = np.stack([row_of(i) for i in range(4)])
    alone = [sample(base[i : i + 1], [one]) for i, one in enumerate(neighbours())]
    for shape in SHAPES:
        for top_p, min_p in ((0.0, 0.0), (1e-9, 0.0), (1.0, 0.0), (1.0, 1.0), (0.5, 1e-9)):
            row = row_of(9)
            shape(row)
            before = row.copy()
            past = past_of((4, 5), (6,), frozenset({7}))
            edge = Sampling(temperature, top_p, top_k, 6, min_p, logit_bias=((2, -100.0),), presence_penalty=2.0)
            drawn = sample(
                np.stack([*base[:2], row, *base[2:]]), [*neighbours()[:2], Draw(edge, 3, past), *neighbours()[2:]]
            )
            token = drawn.token_ids[2]
            assert before[token] > -np.inf
            assert token != 7
            assert drawn.token_ids[:2] + drawn.token_ids[3:] == tuple(a.token_ids[0] for a in alone)
            assert drawn.logprobs[3] == alone[2].logprobs[0]
            if temperature < 1e-5 or top_k == 1 or (temperature < 1e30 and (min_p == 1.0 or top_p <= 1e-9)):
                logits = reshaped(row, edge, (4, 5), (6,), past.banned)
                assert logits[token] == max(logits)


def test_rows_are_left_as_they_are() -> None:
    row = row_of(2)
    before = row.copy()
    past = past_of((1,), (2, 3), frozenset({4}))
    draw(row, Sampling(repetition_penalty=1.5, logit_bias=((1, 5.0),), grammar="no", logprobs=2), past)
    assert row.tobytes() == before.tobytes()
