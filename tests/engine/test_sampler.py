"""Temperature, top_k, top_p, seed and index: the sampler as a pure function of a row of logits."""

import math
from collections import Counter

import numpy as np
import pytest
import torch

from engine.sampler import Draw, Drawn, sample, uniform
from kvrelay.errors import Internal
from kvrelay.requests import Sampling


def logits_of(*probabilities: float) -> torch.Tensor:
    return torch.tensor([math.log(p) if p else -math.inf for p in probabilities])


def draw(row: torch.Tensor, sampling: Sampling, index: int = 0) -> int:
    [token_id] = sample(row.unsqueeze(0).numpy(), [Draw(sampling, index)]).token_ids
    return token_id


def frequencies(row: torch.Tensor, sampling: Sampling, count: int = 2000) -> dict[int, float]:
    drawn = sample(row.expand(count, -1).numpy(), [Draw(sampling, index) for index in range(count)])
    return {token: seen / count for token, seen in sorted(Counter(drawn.token_ids).items())}


def test_uniforms_are_fixed_for_all_time() -> None:
    values = [uniform(1, 0), uniform(1, 1), uniform(2, 0)]
    assert values == [0.3128903027259965, 0.0008045018989779606, 0.18609977342946837]
    assert uniform(-1, 0) == uniform(2**64 - 1, 0)


def test_uniforms_spread_over_the_unit_interval() -> None:
    values = [uniform(seed, index) for seed in range(100) for index in range(100)]
    assert all(0.0 <= value < 1.0 for value in values)
    tenths = Counter(int(value * 10) for value in values)
    assert all(900 < tenths[i] < 1100 for i in range(10))


def test_greedy_takes_the_greatest_and_the_lowest_id_on_ties() -> None:
    row = torch.zeros(50_000)
    row[[7, 900, 40_001]] = 3.0
    assert draw(row, Sampling(temperature=0.0)) == 7


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(seed=5), {0: 0.5, 2: 0.3, 3: 0.15, 4: 0.05}),
        (Sampling(seed=5, top_k=2), {0: 0.625, 2: 0.375}),
        (Sampling(seed=5, top_p=0.9), {0: 0.5 / 0.95, 2: 0.3 / 0.95, 3: 0.15 / 0.95}),
        (Sampling(seed=5, top_p=0.7999), {0: 0.625, 2: 0.375}),
        (Sampling(seed=5, top_k=3, top_p=0.6), {0: 0.625, 2: 0.375}),
        (Sampling(seed=5, temperature=0.5), {0: 0.25 / 0.365, 2: 0.09 / 0.365, 3: 0.0225 / 0.365, 4: 0.0025 / 0.365}),
    ],
)
def test_draws_follow_the_filtered_distribution(sampling: Sampling, expected: dict[int, float]) -> None:
    found = frequencies(logits_of(0.5, 0.0, 0.3, 0.15, 0.05), sampling)
    assert found.keys() == expected.keys()
    for token, probability in expected.items():
        assert found[token] == pytest.approx(probability, abs=0.04)


def test_a_vocabulary_of_many_chunks_is_drawn_as_its_plain_scan() -> None:
    row = torch.randn(49_152 + 17, generator=torch.Generator().manual_seed(3)) * 2
    cumulated = torch.softmax(row.double(), dim=0).cumsum(0)
    for index in range(300):
        expected = int(torch.searchsorted(cumulated, uniform(9, index), right=True))
        assert abs(draw(row, Sampling(seed=9), index) - expected) <= 1


@pytest.mark.parametrize("top_k", [0, 40])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_a_row_gives_the_same_token_in_any_batch(top_k: int, top_p: float) -> None:
    logits = (torch.randn(33, 5000, generator=torch.Generator().manual_seed(1)) * 2).numpy()
    draws = [Draw(Sampling(seed=i, top_k=top_k, top_p=top_p), i) for i in range(33)]
    alone = tuple(sample(logits[i : i + 1], draws[i : i + 1]).token_ids[0] for i in range(33))
    assert sample(logits, draws).token_ids == alone
    assert tuple(reversed(sample(logits[::-1], draws[::-1]).token_ids)) == alone
    mixed = [Draw(Sampling(temperature=0.0), 0) if i % 2 else draw for i, draw in enumerate(draws)]
    assert sample(logits, mixed).token_ids[::2] == alone[::2]


def test_the_seed_and_the_index_alone_decide() -> None:
    row = torch.zeros(1000)
    tokens = {(seed, index): draw(row, Sampling(seed=seed), index) for seed in range(4) for index in range(4)}
    assert len(set(tokens.values())) == 16
    assert tokens[2, 3] == draw(row, Sampling(seed=2), 3)


@pytest.mark.parametrize("temperature", [0.0, 1e-320, 1e-30, 1e-6, 1e-5, 1e-4])
def test_a_tiny_temperature_is_greedy_and_never_overflows(temperature: float) -> None:
    row = torch.tensor([-1e30, 5.0, 4.0, -math.inf, 1e4])
    assert draw(row, Sampling(temperature=temperature, seed=3)) == 4


EXTREMES = [
    (Sampling(top_k=1), {1}),
    (Sampling(top_k=10**9), {1, 2}),
    (Sampling(top_k=3), {1, 2}),
    (Sampling(top_p=1e-9), {1}),
    (Sampling(top_p=0.999999), {1, 2}),
    (Sampling(temperature=1e30), {0, 1, 2}),
    (Sampling(temperature=100.0, top_k=2), {1, 2}),
    (Sampling(temperature=1e30, top_p=1e-9), {0}),
]


@pytest.mark.parametrize(("sampling", "possible"), EXTREMES, ids=[str(s) for s, _ in EXTREMES])
def test_extreme_settings_draw_what_they_allow(sampling: Sampling, possible: set[int]) -> None:
    row = torch.tensor([-90.0, 2.0, 1.5])
    assert set(frequencies(row, sampling, 300)) == possible


def test_all_that_tie_with_the_kth_are_kept() -> None:
    assert set(frequencies(torch.tensor([1.0, 2.0, 1.0, 1.0, 0.0]), Sampling(top_k=2), 300)) == {0, 1, 2, 3}


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    row = torch.full((2000,), -math.inf)
    row[[300, 1999]] = 0.0
    assert set(frequencies(row, Sampling(), 300)) == {300, 1999}


def test_a_row_that_is_not_finite_is_our_bug() -> None:
    for bad in (math.nan, math.inf):
        with pytest.raises(Internal, match="not finite"):
            draw(torch.tensor([0.0, bad]), Sampling())
    with pytest.raises(Internal, match="not finite"):
        draw(torch.full((4,), -math.inf), Sampling(temperature=0.0))


def test_no_rows_give_no_tokens() -> None:
    assert sample(np.empty((0, 10), np.float32), []) == Drawn()
