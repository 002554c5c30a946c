"""The scripted model says what it is told and writes real KV."""

from __future__ import annotations

import pytest
from specs import GREEDY, hash_engine, key, spec

from engine.block_pool import BlockPool
from engine.budgets import Budgets
from engine.local import LocalEngine
from engine.scheduler import Scheduler
from engine.scripted_executor import ScriptedExecutor


def scripted(script: list[int] | dict[int, int]) -> LocalEngine:
    return LocalEngine(ScriptedExecutor(16, script), Scheduler(BlockPool(16), 16, Budgets()))


def test_a_list_is_said_from_index_0_and_eos_follows_it() -> None:
    tokens = scripted([72, 105, 33]).generate([spec("a", 5, 6), spec("b", 20, 2)])
    assert tokens == {key("a"): (72, 105, 33, 257, 257, 257), key("b"): (72, 105)}


def test_eos_after_the_script_ends_a_sequence_that_stops_at_it() -> None:
    assert scripted([72, 105]).generate([spec("a", 5, 9, stop=(257,))]) == {key("a"): (72, 105, 257)}


def test_a_sequence_moved_here_goes_on_in_the_script_at_its_index() -> None:
    assert scripted([1, 2, 3, 4]).generate([spec("a", 5, 4, output=(1, 2))]) == {key("a"): (3, 4)}


def test_a_mapping_names_single_indexes_and_the_rest_is_eos() -> None:
    assert scripted({1: 7}).generate([spec("a", 5, 3)]) == {key("a"): (257, 7, 257)}


def test_it_writes_the_same_kv_as_the_hash_model() -> None:
    ours = scripted([1])
    theirs, _ = hash_engine(16)
    for engine in (ours, theirs):
        engine.generate([spec("a", 40, 1, GREEDY)])
    assert ours.executor.layout == theirs.executor.layout
    for block_id in range(3):
        assert ours.executor.pool.read(block_id) == theirs.executor.pool.read(block_id)
    assert any(ours.executor.pool.read(0))


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ([1, 258], r"script\[1\] is token 258, not in a vocabulary of 258"),
        ([-1], r"script\[0\] is token -1, not in a vocabulary of 258"),
        ({-2: 5}, "script has a token for index -2, the first is 0"),
    ],
)
def test_a_bad_script_is_refused_at_once(script: list[int] | dict[int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ScriptedExecutor(4, script)
