"""A whole engine on pools that are too small: the same tokens as alone, no waste without bound, nothing lost."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from specs import alone, hash_engine, key, spec

from engine.block_pool import BlockPool
from engine.budgets import Budgets
from engine.events import Finished, Preempted, Sampled
from engine.local import LocalEngine
from kvrelay.blocks import blocks_for
from kvrelay.requests import Sampling, SequenceKey, SequenceSpec


class Run:
    """Drives an engine to the end and keeps what came out. Fails on a standstill and on any index out of order."""

    def __init__(self, engine: LocalEngine, pool: BlockPool) -> None:
        self.engine = engine
        self.pool = pool
        self.tokens: dict[SequenceKey, list[int]] = {}
        self.first_index: dict[SequenceKey, int] = {}
        self.finished: Counter[SequenceKey] = Counter()
        self.preemptions: Counter[SequenceKey] = Counter()
        self.computed = 0

    def add(self, sequence: SequenceSpec, block_ids: tuple[int, ...] = (), num_computed: int = 0) -> None:
        self.engine.scheduler.add(sequence, block_ids=block_ids, num_computed=num_computed)
        self.tokens[sequence.key] = []
        self.first_index[sequence.key] = sequence.first_index

    def step(self) -> None:
        scheduler = self.engine.scheduler
        plan = scheduler.schedule()
        if plan is None:
            assert not scheduler.has_work, f"nothing can run with {scheduler.queued_tokens} tokens queued"
            return
        self.computed += plan.num_tokens
        for event in scheduler.apply(plan, self.engine.executor.run(plan)):
            if isinstance(event, Sampled):
                assert event.index == self.first_index[event.key] + len(self.tokens[event.key])
                self.tokens[event.key].append(event.token_id)
            self.finished[event.key] += isinstance(event, Finished)
            self.preemptions[event.key] += isinstance(event, Preempted)
        self.pool.check_integrity()

    def to_the_end(self) -> None:
        while self.engine.scheduler.has_work:
            self.step()
        assert self.finished == dict.fromkeys(self.tokens, 1)


def sampling(number: int) -> Sampling:
    return Sampling(temperature=float(number % 2), seed=number)


def random_workload(seed: int) -> tuple[int, int, Budgets, list[SequenceSpec]]:
    draw = random.Random(seed)
    num_blocks, block_size = draw.randint(3, 40), draw.choice([1, 2, 4, 8])
    limit = min(num_blocks * block_size, 160)
    specs = []
    for number in range(draw.randint(1, 10)):
        prompt = draw.randint(1, max(1, int((limit - 1) * draw.choice([0.1, 0.4, 1]))))
        max_tokens = draw.randint(1, max(1, min(limit - prompt, int(limit * draw.choice([0.1, 0.3, 1])))))
        tokens = [draw.randrange(256) for _ in range(prompt)]
        specs.append(spec(f"r{number}", tokens, max_tokens, sampling(number), stop=(257,)))
    budgets = Budgets(draw.choice([3, 8, 64]), draw.choice([1, 2, 4, 16]), draw.choice([None, 1, 4]))
    return num_blocks, block_size, budgets, specs


@pytest.mark.parametrize("batch", range(8))
def test_any_workload_on_any_small_pool_gives_the_tokens_of_each_alone_for_at_most_three_times_the_work(
    batch: int,
) -> None:
    for seed in range(25 * batch, 25 * batch + 25):
        num_blocks, block_size, budgets, specs = random_workload(seed)
        engine, pool = hash_engine(num_blocks, block_size, budgets)
        run = Run(engine, pool)
        arrivals = random.Random(-seed)
        for sequence in specs:
            run.add(sequence)
            for _ in range(arrivals.randint(0, 6)):
                if engine.scheduler.has_work:
                    run.step()
        run.to_the_end()
        assert {k: tuple(v) for k, v in run.tokens.items()} == {s.key: alone(s, block_size) for s in specs}, seed
        assert max(run.preemptions.values()) <= 4, seed
        least = sum(len(s.token_ids) + len(run.tokens[s.key]) - 1 for s in specs)
        assert least <= run.computed <= 3 * least, seed
        assert pool.num_free == num_blocks
        engine.executor.close()


def test_two_prompts_of_0_6_of_the_pool_with_200_outputs_each_waste_less_than_as_much_again() -> None:
    specs = [spec(name, 360, 200, sampling(i)) for i, name in enumerate(("a", "b"))]
    engine, pool = hash_engine(38, 16, Budgets(max_tokens=64))
    run = Run(engine, pool)
    for sequence in specs:
        run.add(sequence)
    run.to_the_end()
    assert {k: tuple(v) for k, v in run.tokens.items()} == {s.key: alone(s) for s in specs}
    assert run.computed <= 2 * 2 * (360 + 199)
    assert max(run.preemptions.values()) <= 4


def test_twenty_requests_of_256_tokens_are_preempted_often_and_no_token_is_lost_or_doubled() -> None:
    specs = [spec(f"r{n}", 5 + n, 256, sampling(n)) for n in range(20)]
    engine, pool = hash_engine(60, 16, Budgets())
    run = Run(engine, pool)
    for sequence in specs:
        run.add(sequence)
    run.to_the_end()
    assert sum(run.preemptions.values()) >= 20
    assert max(run.preemptions.values()) <= 4
    assert {k: tuple(v) for k, v in run.tokens.items()} == {s.key: alone(s) for s in specs}
    assert pool.num_free == 60


def prefilled(sequence: SequenceSpec) -> tuple[list[bytes], int]:
    """Blocks of its prompt and token 0, computed elsewhere."""
    engine, _ = hash_engine(64)
    first = spec(sequence.key.request_id, sequence.token_ids, 1, sequence.sampling)
    [token_id] = engine.generate([first])[sequence.key]
    blocks = [bytes(engine.executor.pool.read(i)) for i in range(blocks_for(len(sequence.token_ids), 16))]
    return blocks, token_id


def hand_over(run: Run, sequence: SequenceSpec) -> bool:
    """Reserve, write, land and start, as a decode worker would; False if the blocks are not there."""
    blocks, token_id = prefilled(sequence)
    n = len(sequence.token_ids)
    ids = run.pool.reserve(blocks_for(n + 1, 16), epoch=1)
    if ids is None:
        return False
    for block_id, data in zip(ids, blocks, strict=False):
        run.engine.executor.pool.write(block_id, 0, data)
    run.pool.hold_reserved(ids, epoch=1)
    after = spec(
        sequence.key.request_id, sequence.token_ids, sequence.stop.max_tokens, sequence.sampling, output=(token_id,)
    )
    run.add(after, ids, n)
    return True


def test_six_sequences_handed_over_to_a_pool_for_two_are_all_preempted_or_wait_and_all_finish_exactly() -> None:
    specs = [spec(f"r{n}", 30 + n, 300, sampling(n)) for n in range(6)]
    engine, pool = hash_engine(44)
    run = Run(engine, pool)
    for sequence in specs:
        assert hand_over(run, sequence)
    run.to_the_end()
    assert {k: tuple(v) for k, v in run.tokens.items()} == {s.key: alone(s)[1:] for s in specs}
    assert sum(n > 0 for n in run.preemptions.values()) >= 4
    assert max(run.preemptions.values()) <= 4
    assert pool.num_free == 44


def test_128_sequences_handed_over_to_a_pool_for_20_all_finish_exactly() -> None:
    specs = [spec(f"r{n}", 17 + n % 30, 20, sampling(n)) for n in range(128)]
    engine, pool = hash_engine(80, budgets=Budgets(max_sequences=24))
    run = Run(engine, pool)
    waiting = list(specs)
    while waiting or engine.scheduler.has_work:
        while waiting and engine.scheduler.spare_blocks > 4 and hand_over(run, waiting[0]):
            waiting.pop(0)
        run.step()
    assert {k: tuple(v) for k, v in run.tokens.items()} == {s.key: alone(s)[1:] for s in specs}
    assert run.finished == dict.fromkeys(run.tokens, 1)
    assert pool.num_free == 80


def test_a_flipped_byte_in_the_pool_changes_what_a_running_sequence_says() -> None:
    expected = alone(spec("r", 40, 20))
    engine, pool = hash_engine(16)
    run = Run(engine, pool)
    run.add(spec("r", 40, 20))
    for _ in range(5):
        run.step()
    byte = engine.executor.pool.read(1)[100]
    engine.executor.pool.write(1, 100, bytes([byte ^ 0x80]))
    run.to_the_end()
    tokens = tuple(run.tokens[key("r")])
    assert tokens[:5] == expected[:5]
    assert tokens[5:] != expected[5:]


def test_generate_returns_the_tokens_of_every_sequence_and_stream_the_events_in_order() -> None:
    engine, _ = hash_engine(16)
    specs = [spec("a", 3, 4), spec("b", 20, 2)]
    tokens = engine.generate(specs)
    assert {k: len(v) for k, v in tokens.items()} == {key("a"): 4, key("b"): 2}
    events = [e for e in hash_engine(16)[0].stream(specs) if isinstance(e, Sampled)]
    assert [(e.key.request_id, e.index) for e in events] == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2), ("a", 3)]
    assert engine.step() == ()
