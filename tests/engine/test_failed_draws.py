"""A token that cannot be drawn ends its own sequence, with a reason, and no other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from specs import key, sequences_of, spec

from engine.block_pool import BlockPool
from engine.budgets import Budgets
from engine.events import Computed, Event, Failed, Finished, Sampled
from engine.hash_executor import HashExecutor
from engine.local import LocalEngine
from engine.plan import Result
from engine.sampler import Draw, Floats, GrammarFailed
from engine.scheduler import Scheduler
from kvrelay.blocks import BlockCounts
from kvrelay.errors import InvalidArgument
from kvrelay.requests import Logprobs, Sampling

LIMITED = Sampling(1.0, seed=3, grammar="any")


class FailsAt:
    """A grammar of any tokens that breaks for these sequences at these output indexes."""

    def __init__(self, places: dict[int, int]) -> None:
        self._places = places

    def disallow(self, row: Floats, draw: Draw) -> None:
        assert draw.key is not None
        assert draw.past is not None
        assert len(draw.past.output) == draw.index
        if self._places.get(draw.key.sequence) == draw.index:
            raise GrammarFailed(f"broken in {draw.key.sequence}")
        row[:32] = -np.inf


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(40)


def engine_of(pool: BlockPool, places: dict[int, int], budgets: Budgets | None = None) -> LocalEngine:
    executor = HashExecutor(pool.num_blocks, 8, grammars=FailsAt(places))
    return LocalEngine(executor, Scheduler(pool, 8, budgets or Budgets()))


def events_of(engine: LocalEngine) -> Iterator[Event]:
    while engine.scheduler.has_work:
        yield from engine.step()


def test_the_others_of_a_batch_go_on_and_the_blocks_are_free(pool: BlockPool) -> None:
    engine = engine_of(pool, {0: 4})
    engine.add(spec("limited", 10, 9, LIMITED))
    engine.add(spec("plain", 10, 9, Sampling(seed=1)))
    engine.add(spec("biased", 10, 9, Sampling(seed=1, logit_bias=((1, 1.0),))))
    events = list(events_of(engine))
    said = [e for e in events if e.key == key("limited") and not isinstance(e, Computed)]
    assert [type(e) for e in said] == [Sampled] * 4 + [Failed]
    assert said[-1] == Failed(key("limited"), "broken in 0")
    assert all(e.token_id >= 32 for e in said if isinstance(e, Sampled))
    assert {e.key.request_id: e.num_tokens for e in events if isinstance(e, Finished)} == {"plain": 9, "biased": 9}
    assert pool.counts() == BlockCounts(40, 40)
    assert engine.scheduler.queued_tokens == 0


def test_a_failure_with_the_prompt_keeps_its_blocks_until_a_push_has_seen_them(pool: BlockPool) -> None:
    engine = engine_of(pool, {0: 0})
    one = spec("limited", 20, 9, LIMITED)
    engine.add(one)
    computed, failed = engine.step()
    assert isinstance(computed, Computed)
    assert failed == Failed(one.key, "broken in 0")
    assert pool.counts().held == 3
    assert engine.scheduler.has_work
    assert engine.step() == ()
    assert pool.counts() == BlockCounts(40, 40)
    assert not engine.scheduler.has_work


@pytest.mark.parametrize("failing", [{0: 0}, {2: 0}, {0: 0, 1: 0, 2: 0, 3: 0}, {0: 3}, {1: 3, 3: 0}], ids=str)
def test_of_the_sequences_of_a_request_only_those_end_that_fail(pool: BlockPool, failing: dict[int, int]) -> None:
    one = replace(spec("four", 21, 6, replace(LIMITED, logprobs=1)), n=4)
    neighbour = spec("neighbour", 9, 6, Sampling(seed=1))
    unharmed = engine_of(BlockPool(40), {}).generate([*sequences_of(one), neighbour])
    engine = engine_of(pool, failing)
    engine.add(one)
    engine.add(neighbour)
    events = list(events_of(engine))
    for sequence in (*sequences_of(one), neighbour):
        number, mine = sequence.key.sequence, [e for e in events if e.key == sequence.key]
        tokens = [e for e in mine if isinstance(e, Sampled)]
        ends = failing.get(number, 6) if sequence is not neighbour else 6
        assert tuple(e.token_id for e in tokens) == unharmed[sequence.key][:ends]
        assert all((e.logprobs is not None) == (sequence is not neighbour) for e in tokens)
        assert mine[-1] == (Failed(sequence.key, f"broken in {number}") if ends < 6 else mine[-1])
        assert sum(isinstance(e, Failed | Finished) for e in mine) == 1
    assert pool.counts() == BlockCounts(40, 40)
    pool.check_integrity()


@pytest.mark.parametrize("aborted", [0, 1])
def test_an_abort_in_flight_and_a_failure_of_the_same_step_release_once(pool: BlockPool, aborted: int) -> None:
    one = replace(spec("two", 21, 6, LIMITED), n=2)
    engine = engine_of(pool, {0: 2, 1: 2})
    engine.add(one)
    engine.step()
    engine.step()
    plan = engine.scheduler.schedule()
    assert plan is not None
    engine.abort(replace(one.key, sequence=aborted))
    events = engine.scheduler.apply(plan, engine.executor.run(plan))
    assert [e.key.sequence for e in events] == [1 - aborted]
    assert pool.counts() == BlockCounts(40, 40)
    assert not engine.scheduler.has_work


def test_a_result_says_what_failed_by_position(pool: BlockPool) -> None:
    """Of two requests, one of three sequences: positions count draws, not slices."""
    scheduler = Scheduler(pool, 8, Budgets())
    scheduler.add(spec("one", 5, 4))
    scheduler.add(replace(spec("three", 5, 4), n=3))
    plan = scheduler.schedule()
    assert plan is not None
    logprobs = tuple(Logprobs(-float(i)) for i in range(4))
    events = scheduler.apply(plan, Result(plan.step_id, (10, 11, 12, 13), None, logprobs, ((1, "a"), (3, "b"))))
    assert [e for e in events if not isinstance(e, Computed)] == [
        Sampled(key("one"), 0, 10, logprobs[0]),
        Sampled(replace(key("three"), sequence=1), 0, 12, logprobs[2]),
        Failed(replace(key("three"), sequence=2), "b"),
        Failed(key("three"), "a"),
    ]
    assert [(s.key.request_id, s.key.sequence) for s in (scheduler.schedule() or plan).slices] == [
        ("one", 0),
        ("three", 1),
    ]


def test_an_engine_by_itself_raises_what_failed_after_the_events_of_that_step(pool: BlockPool) -> None:
    engine = engine_of(pool, {0: 2})
    seen: list[Event] = []
    with pytest.raises(InvalidArgument, match="broken in 0"):
        seen.extend(engine.stream([spec("limited", 10, 9, LIMITED), spec("plain", 10, 9)]))
    assert [e.key.request_id for e in seen if isinstance(e, Sampled)].count("plain") == 3
    assert len(engine.generate([])[key("plain")]) == 6
    assert pool.counts() == BlockCounts(40, 40)
