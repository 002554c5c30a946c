"""The hash model notices every byte of KV, and nothing else."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from specs import alone, hash_engine, key, spec

from engine.budgets import Budgets
from engine.hash_executor import HashExecutor
from engine.plan import Plan, Result, SequenceSlice
from kvrelay.blocks import BlockTable
from kvrelay.requests import Sampling

PROMPT = tuple(i * i % 251 for i in range(37))
SEEDED = Sampling(temperature=1.0, seed=11)


@pytest.fixture
def executor() -> Iterator[HashExecutor]:
    executor = HashExecutor(num_blocks=16, block_size=4)
    yield executor
    executor.close()


def run(
    executor: HashExecutor,
    token_ids: tuple[int, ...],
    start: int,
    block_ids: tuple[int, ...],
    sampling: Sampling = SEEDED,
    index: int = 0,
) -> int:
    table = BlockTable(0, executor.layout.block_size, block_ids, start + len(token_ids))
    rows = SequenceSlice(key("r"), token_ids, start, table, True, index, sampling)
    [token_id] = executor.run(Plan(1, (rows,))).token_ids
    return token_id


def test_the_token_does_not_depend_on_how_the_prompt_was_chunked(executor: HashExecutor) -> None:
    whole = run(executor, PROMPT, 0, tuple(range(10)))
    for cut in range(1, len(PROMPT)):
        other = HashExecutor(16, 4)
        run(other, PROMPT[:cut], 0, tuple(range(10)))
        assert run(other, PROMPT[cut:], cut, tuple(range(10))) == whole
        other.close()


def test_the_token_does_not_depend_on_which_blocks_hold_the_kv(executor: HashExecutor) -> None:
    assert run(executor, PROMPT, 0, tuple(range(10))) == run(executor, PROMPT, 0, (15, 3, 9, 0, 1, 14, 7, 8, 2, 5))


@pytest.mark.parametrize("sampling", [SEEDED, Sampling(temperature=0.0)])
@pytest.mark.parametrize("position", [0, 3, 17, 35])
@pytest.mark.parametrize("row", ["K", "V"])
def test_one_flipped_byte_anywhere_in_the_kv_changes_the_next_token(
    executor: HashExecutor, sampling: Sampling, position: int, row: str
) -> None:
    blocks = (7, 3, 9, 0, 1, 14, 15, 8, 2, 5)
    run(executor, PROMPT[:-1], 0, blocks, sampling)
    before = run(executor, PROMPT[-1:], 36, blocks, sampling)
    block_id, slot = blocks[position // 4], position % 4
    offset = slot * 32 + (4 * 32 if row == "V" else 0) + 31
    byte = executor.pool.read(block_id)[offset]
    executor.pool.write(block_id, offset, bytes([byte ^ 1]))
    assert run(executor, PROMPT[-1:], 36, blocks, sampling) != before
    executor.pool.write(block_id, offset, bytes([byte]))
    assert run(executor, PROMPT[-1:], 36, blocks, sampling) == before


def test_swapped_stale_or_zeroed_blocks_change_the_next_token(executor: HashExecutor) -> None:
    blocks = tuple(range(10))
    run(executor, PROMPT[:-1], 0, blocks)
    before = run(executor, PROMPT[-1:], 36, blocks)
    assert run(executor, PROMPT[-1:], 36, (1, 0, *blocks[2:])) != before
    assert run(executor, PROMPT[-1:], 36, (*blocks[:4], 12, *blocks[5:])) != before


def test_bytes_after_the_last_row_are_not_read(executor: HashExecutor) -> None:
    before = run(executor, PROMPT, 0, tuple(range(10)))
    executor.pool.write(9, 32, b"\xff" * 96)
    assert run(executor, PROMPT, 0, tuple(range(10))) == before


def test_seed_and_index_matter_exactly_when_sampling_is_not_greedy() -> None:
    executor = HashExecutor(10, 4, vocab_size=1 << 40)
    blocks = tuple(range(10))
    drawn = {run(executor, PROMPT, 0, blocks, Sampling(seed=s), i) for s in range(3) for i in range(3)}
    greedy = {run(executor, PROMPT, 0, blocks, Sampling(0.0, seed=s), i) for s in range(3) for i in range(3)}
    assert (len(drawn), len(greedy)) == (9, 1)


def test_batching_with_others_changes_no_token() -> None:
    specs = [
        spec(f"r{n}", PROMPT[: n + 1], 12, Sampling(temperature=float(n % 2), seed=n)) for n in (0, 14, 15, 16, 30, 36)
    ]
    for max_tokens in (1, 7, 512):
        engine, _ = hash_engine(64, budgets=Budgets(max_tokens=max_tokens))
        tokens = engine.generate(specs)
        assert tokens == {s.key: alone(s) for s in specs}


def test_kv_copied_to_other_blocks_of_another_pool_goes_on_with_the_same_tokens() -> None:
    expected = alone(spec("r", PROMPT, 10), block_size=4)
    first, _ = hash_engine(16, 4)
    assert first.generate([spec("r", PROMPT, 1)])[key("r")] == expected[:1]
    second, pool = hash_engine(32, 4)
    pool.allocate(5)
    blocks = pool.allocate(10)
    assert blocks is not None
    for source, target in enumerate(blocks):
        second.executor.pool.write(target, 0, first.executor.pool.read(source))
    moved = spec("r", PROMPT, 10, output=expected[:1])
    second.scheduler.add(moved, block_ids=blocks, num_computed=len(PROMPT))
    assert second.generate([]) == {key("r"): expected[1:]}
    assert pool.num_free == 32 - 5


def test_it_samples_only_rows_that_ask_for_it_and_stays_in_the_vocabulary() -> None:
    executor = HashExecutor(8, vocab_size=5, eos_token_id=4)
    table = BlockTable(0, 16, (0,), 3)
    silent = SequenceSlice(key("a"), (1, 2, 3), 0, table, False, 0, SEEDED)
    asking = [SequenceSlice(key("b"), (n,), 0, BlockTable(0, 16, (1,), 1), True, 0, SEEDED) for n in range(5)]
    result = executor.run(Plan(3, (silent, *asking)))
    assert result == Result(3, result.token_ids)
    assert len(result.token_ids) == 5
    assert all(0 <= t < 5 for t in result.token_ids)


def test_a_slow_model_pauses_once_a_step_with_the_function_it_was_given() -> None:
    pauses: list[float] = []
    executor = HashExecutor(8, step_seconds=0.25, pause=pauses.append)
    run(executor, (1, 2), 0, (0,))
    run(executor, (3,), 2, (0,))
    assert pauses == [0.25, 0.25]
    with pytest.raises(ValueError, match="need a pause function"):
        HashExecutor(8, step_seconds=0.25)
    with pytest.raises(ValueError, match="eos_token_id 257 is not in a vocabulary of 100"):
        HashExecutor(8, vocab_size=100)


def test_a_prompt_of_1000_tokens_takes_well_under_a_second_and_decode_goes_on_quickly() -> None:
    engine, _ = hash_engine(80, budgets=Budgets(max_tokens=2048))
    engine.add(spec("long", 1000, 20))
    start = time.thread_time()
    engine.step()
    prefilled = time.thread_time()
    assert prefilled - start < 0.3
    while engine.scheduler.has_work:
        engine.step()
    assert time.thread_time() - prefilled < 19 * 0.003, "ten times what it takes on an idle machine"
