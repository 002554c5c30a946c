"""Where a stream ends: stop tokens that are wanted, not wanted yet, or not at all, from the first token on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from specs import alone, hash_engine, spec

from engine.block_pool import BlockPool
from engine.budgets import Budgets
from engine.events import Finished, Sampled
from engine.local import LocalEngine
from engine.scheduler import Scheduler
from engine.scripted_executor import ScriptedExecutor
from kvrelay.requests import FinishReason, Sampling, SequenceSpec

EOS = 257
SEEDED = Sampling(seed=6)


def scripted(script: list[int]) -> LocalEngine:
    return LocalEngine(ScriptedExecutor(16, script), Scheduler(BlockPool(16), 16, Budgets()))


def run(engine: LocalEngine, one: SequenceSpec) -> tuple[list[int], FinishReason]:
    events = list(engine.stream([one]))
    [end] = [e for e in events if isinstance(e, Finished)]
    tokens = [e.token_id for e in events if isinstance(e, Sampled)]
    assert end.num_tokens == len(tokens)
    return tokens, end.reason


def with_floor(one: SequenceSpec, min_tokens: int) -> SequenceSpec:
    return replace(one, stop=replace(one.stop, min_tokens=min_tokens))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_eos_that_a_bias_makes_sure_is_the_only_token(temperature: float) -> None:
    engine, _ = hash_engine(16)
    sampling = Sampling(temperature, seed=2, logit_bias=((EOS, 100.0),))
    assert run(engine, spec("a", 20, 8, sampling, stop=(EOS,))) == ([EOS], FinishReason.STOP)
    assert run(engine, spec("a", 20, 8, sampling)) == ([EOS] * 8, FinishReason.LENGTH)


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
@pytest.mark.parametrize("sampling", [SEEDED, replace(SEEDED, logprobs=1)], ids=["plain", "told"])
def test_counts_are_exact_at_one_two_and_three_tokens(max_tokens: int, sampling: Sampling) -> None:
    engine, _ = hash_engine(16)
    said = alone(spec("a", 20, 3, sampling))
    assert run(engine, spec("a", 20, max_tokens, sampling)) == ([*said[:max_tokens]], FinishReason.LENGTH)
    for stop in said:
        at = said.index(stop)
        reason = FinishReason.STOP if at < max_tokens else FinishReason.LENGTH
        assert run(engine, spec("a", 20, max_tokens, sampling, stop=(stop,))) == (
            [*said[: at + 1]][:max_tokens],
            reason,
        )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("min_tokens", "num_tokens"), [(0, 2), (1, 2), (2, 3), (5, 6)])
def test_a_model_that_wants_to_end_does_so_right_at_the_floor(
    min_tokens: int, num_tokens: int, temperature: float
) -> None:
    one = with_floor(spec("a", 20, 9, Sampling(temperature, seed=1), stop=(EOS, 0)), min_tokens)
    tokens, reason = run(scripted([72]), one)
    assert (len(tokens), reason) == (num_tokens, FinishReason.STOP)
    assert (tokens[0], tokens[-1]) == (72, EOS)
    assert not {EOS, 0} & set(tokens[:-1])


def test_a_first_token_that_would_end_it_is_another_below_the_floor() -> None:
    tokens, _ = run(scripted([EOS]), with_floor(spec("a", 20, 9, stop=(EOS,)), 1))
    assert len(tokens) == 2
    assert tokens[0] != EOS


def test_a_floor_with_nothing_to_ban_changes_nothing_that_is_drawn() -> None:
    greedy = spec("a", 20, 9, stop=(EOS,))
    engine, _ = hash_engine(16)
    assert EOS not in (tokens := alone(greedy))
    assert run(engine, with_floor(greedy, 9)) == ([*tokens], FinishReason.LENGTH)


def tokens_of(sampling: Sampling, script: Iterable[int] = (72, 73, 74)) -> list[int]:
    return run(scripted([*script]), spec("a", 20, 3, sampling))[0]


def test_a_script_is_said_whatever_is_asked_beside_it_unless_that_outweighs_it() -> None:
    assert tokens_of(Sampling(1.0, seed=1, logprobs=2)) == [72, 73, 74]
    assert tokens_of(Sampling(1.0, seed=1, min_p=0.1, frequency_penalty=0.5)) == [72, 73, 74]
    assert tokens_of(Sampling(1.0, seed=1, logit_bias=((65, 100.0),))) == [65, 65, 65]
    assert 73 not in tokens_of(Sampling(1.0, seed=1, logit_bias=((73, -100.0),)))
