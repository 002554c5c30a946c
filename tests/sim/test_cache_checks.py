"""The simulator's checks of caches find what they are for: contents, who knows of them, who shares them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from engine.budgets import Budgets
from engine.hash_executor import HashExecutor
from engine.local import LocalEngine
from engine.scheduler import Scheduler
from kvrelay.blocks import BlockEventKind, BlockEvents, BlockRun, KeyScope, block_keys
from kvrelay.config import CoordinatorConfig
from kvrelay.requests import FinishReason, RequestId, Role, Sampling, SequenceKey, SequenceSpec, SessionId, StopRule
from sim.checks import check_worker, holds_nothing, knows_wrong
from sim.clients import History
from sim.coordinator_node import Ask, CoordinatorNode
from sim.memory import Fabric, LedgerPool
from sim.network import Network
from sim.reference import Answer
from sim.scenario import asks_of, scenario_of
from sim.shapes import WorkerShape
from sim.sharing import shared_too_much
from sim.worker_node import WorkerNode
from sim.world import Violation, World, dropping_what_is_left

GREEDY = Sampling(temperature=0.0)
PROMPT = tuple(range(40))


def spec(name: str, prompt: tuple[int, ...]) -> SequenceSpec:
    key = SequenceKey(SessionId("s"), RequestId(name), 0)
    return SequenceSpec(key, prompt, len(prompt), GREEDY, StopRule(4))


@pytest.fixture
def engine() -> Iterator[LocalEngine]:
    """One with a pool that checks what it caches, and a request of 40 tokens behind it: two full blocks."""
    executor = HashExecutor(8, 16)
    pool = LedgerPool(8, cache=True)
    pool.bytes_of = executor.pool.read
    made = LocalEngine(executor, Scheduler(pool, 16, Budgets()))
    made.generate([spec("first", PROMPT)])
    yield made
    executor.close()


def test_what_an_engine_caches_is_what_its_keys_promise(engine: LocalEngine) -> None:
    pool = engine.scheduler._pool
    assert isinstance(pool, LedgerPool)
    pool.check_contents()
    assert pool.counts().cached == 2


def test_a_wrong_byte_under_a_key_is_found_when_it_is_looked_for_and_when_it_is_used(engine: LocalEngine) -> None:
    pool = engine.scheduler._pool
    assert isinstance(pool, LedgerPool) and pool.cache is not None
    last = next(b for b in range(8) if pool.cache.entry_of(b) is not None)
    engine.executor.pool.write(last, 5, b"\xff" if engine.executor.pool.read(last)[5] != 0xFF else b"\x00")
    with pytest.raises(Violation, match="its bytes are not those of its tokens"):
        pool.check_contents()
    with pytest.raises(Violation, match=f"block {last} has a key"):
        engine.generate([spec("second", PROMPT)])


def test_a_block_under_a_key_of_other_tokens_is_found(engine: LocalEngine) -> None:
    pool = engine.scheduler._pool
    assert pool.cache is not None
    first = pool.cache.match(block_keys(KeyScope("default", ""), PROMPT, 16), PROMPT, 16)[0]
    (wrong,) = block_keys(KeyScope("other", ""), PROMPT[:16], 16)
    (block,) = pool.allocate(1) or ()
    with pytest.raises(Violation, match="its key is not that of its tokens behind its parent"):
        pool.publish(block, wrong, PROMPT[16:32], first)


def in_cluster(check: Callable[[World, CoordinatorNode, WorkerNode], None]) -> None:
    """Calls it with one coordinator and one decode worker that have just started; nothing of them is left behind."""
    with dropping_what_is_left():
        _call(check)


def _call(check: Callable[[World, CoordinatorNode, WorkerNode], None]) -> None:
    world = World(5)
    net = Network(world)
    coordinator = CoordinatorNode(world, net, "c0", 1, CoordinatorConfig(executor="hash"))
    shape = WorkerShape(Role.DECODE, "d0", ("c0:1",), "nixl", 8, 32, 4, 0.01, swap_slots=4)
    worker = WorkerNode(world, net, Fabric(world), shape, 1)
    check(world, coordinator, worker)
    worker.executor.close()


def test_a_coordinator_knows_what_a_worker_caches_or_it_is_told() -> None:
    def check(world: World, coordinator: CoordinatorNode, worker: WorkerNode) -> None:
        assert "no session" in knows_wrong(coordinator, worker)
        assert world.run_until(lambda: not knows_wrong(coordinator, worker), 10.0)
        (key,) = block_keys(KeyScope("default", ""), PROMPT[:16], 16)
        stored = BlockEvents(1, (BlockRun(BlockEventKind.STORED, (key,)),))
        coordinator.roster._cached.index.apply(worker.description.worker_id, stored)
        assert knows_wrong(coordinator, worker) == (
            "c0 knows of 0 blocks that d0 caches: 0 missing, 1 too many, 0 values of events held"
        )

    in_cluster(check)


def test_what_a_step_still_reads_has_an_owner_and_a_place_in_host_memory_is_given_back() -> None:
    def check(world: World, _: CoordinatorNode, worker: WorkerNode) -> None:
        world.run_until(lambda: False, 0.5)
        room, pool = worker.core._p.scheduler.room, worker.pool
        for owners in (room._sources, room._leaving):
            (block,) = pool.allocate(1) or ()
            owners[block] += 1
        room._emptied += pool.allocate(1) or ()
        check_worker(worker)
        room.settle()
        check_worker(worker)
        assert holds_nothing(worker) == ""
        room._swap.take(3)
        assert "3 blocks in host memory" in holds_nothing(worker)

    in_cluster(check)


def test_a_promise_to_nobody_is_found() -> None:
    def check(world: World, _: CoordinatorNode, worker: WorkerNode) -> None:
        world.run_until(lambda: False, 0.5)
        worker.core._p.scheduler._queues.promised += 1
        with pytest.raises(Violation, match="1 blocks are promised, and to running sequences 0"):
            check_worker(worker)

    in_cluster(check)


def history(name: str, prompt: tuple[int, ...], cached: int, **more: object) -> History:
    ask = Ask(name, prompt, GREEDY, StopRule(3), **more)  # type: ignore[arg-type]  # as they come
    made = History(ask, (Answer((7, 8, 9), "", FinishReason.LENGTH),))
    made.seen[0].finish = type("Finish", (), {"cached_tokens": cached})()
    return made


@pytest.mark.parametrize(
    ("salt", "keeps", "cached", "words"),
    [
        ("", True, 43, ""),
        ("", True, 44, "b: 44 tokens were cached, others have 43 in common with it"),
        ("x", True, 16, "b: 16 tokens were cached, others have 0 in common with it"),
        ("", False, 16, "b: 16 tokens were cached, others have 0 in common with it"),
    ],
)
def test_cached_tokens_come_from_others_with_the_same_salt(salt: str, keeps: bool, cached: int, words: str) -> None:
    first = history("a", PROMPT, 0, cache_salt=salt, prefix_cache=keeps)
    turn = history("b", (*PROMPT, 7, 8, 9, 1, 2), cached)
    assert shared_too_much([first, turn], {"a", "b"}) == words
    assert shared_too_much([first, turn], {"a"}) == ""


def test_requests_begin_alike_and_go_on_from_answers() -> None:
    seeds = [scenario_of(seed) for seed in range(40)]
    asks = [(seed, ask) for seed in seeds for ask, _ in asks_of(seed, two_tokens)]
    followed = sum(bool(ask.after) for _, ask in asks)
    assert 0.2 < followed / len(asks) < 0.7
    assert {ask.n for _, ask in asks} == {1, 2, 4}
    assert {ask.cache_salt for _, ask in asks} == {"", "a", "b"}
    assert {ask.prefix_cache for _, ask in asks} == {True, False}
    assert all(len(ask.prompt_ids) + ask.stop.max_tokens <= seed.smallest_pool * 16 for seed, ask in asks)
    assert {seed.router for seed in seeds} == {"cache_aware", "least_loaded", "round_robin", "random"}
    assert {seed.local_prefill_below for seed in seeds} == {0, 24, 1000}
    without_prefill = [seed for seed in seeds if all(w.role is Role.DECODE for w in seed.workers)]
    assert 0 < len(without_prefill) < 10


def two_tokens(ask: Ask) -> tuple[Answer, ...]:
    return (Answer((1, 2), "", FinishReason.LENGTH),) * ask.n
