"""What a step costs in the scheduler alone, and a block in the pool: microseconds of CPU, no model behind it.

python bench/scheduler.py [--sequences 256] [--context 1000] [--steps 300] [--no-prefix-cache]

Each sequence was handed over with its prompt's keys and publishes every 16th token, a sixteenth of them in each step.
Keys of long prompts are measured by bench/prefix.py.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from engine.block_pool import BlockPool
from engine.budgets import Budgets
from engine.plan import Result
from engine.prefix_cache import Entry
from engine.scheduler import Scheduler
from kvrelay.blocks import KeyScope, block_keys
from kvrelay.requests import RequestId, Sampling, SequenceKey, SequenceSpec, SessionId, StopRule

BLOCK_SIZE = 16
NUM_BLOCKS = 20_000


def spec(number: int, length: int, steps: int) -> SequenceSpec:
    """A prompt that no other begins like, with the token after it."""
    key = SequenceKey(SessionId("bench"), RequestId(f"r{number}"), 1)
    tokens = tuple(range(number, number + length + 1))
    return SequenceSpec(key, tokens, length, Sampling(seed=number), StopRule(steps + 10, frozenset({0})))


def loaded(sequences: int, context: int, steps: int, cache: bool) -> Scheduler:
    """A scheduler whose sequences have all been handed over: each has one token to compute.

    Lengths are spread, so that a sixteenth of the sequences needs a new block in each step."""
    pool = BlockPool(sequences * ((context + steps + 30) // BLOCK_SIZE + 2), cache=cache)
    scheduler = Scheduler(pool, BLOCK_SIZE, Budgets(max_tokens=sequences, max_sequences=sequences))
    for number in range(sequences):
        length = context + number % BLOCK_SIZE
        blocks = pool.allocate(length // BLOCK_SIZE + 1)
        assert blocks is not None
        one = replace(spec(number, length, steps), prefix_cache=cache)
        scheduler.add(one, block_ids=blocks, num_computed=length)
    return scheduler


def steps_us(args: argparse.Namespace) -> dict[str, list[float]]:
    scheduler = loaded(args.sequences, args.context, args.steps, args.prefix_cache)
    took: dict[str, list[float]] = {"schedule": [], "apply": []}
    for _ in range(args.steps):
        t0 = time.thread_time()
        plan = scheduler.schedule()
        t1 = time.thread_time()
        assert plan is not None
        result = Result(plan.step_id, (7,) * len(plan.slices))
        t2 = time.thread_time()
        scheduler.apply(plan, result)
        t3 = time.thread_time()
        took["schedule"].append((t1 - t0) * 1e6 / args.sequences)
        took["apply"].append((t3 - t2) * 1e6 / args.sequences)
    return took


class PoolRun:
    """One pass over all operations of a pool, each on every block of it; microseconds a block."""

    def __init__(self, num_blocks: int) -> None:
        self.took: dict[str, float] = {}
        tokens = list(range(num_blocks * BLOCK_SIZE))
        self._tokens = [tokens[i : i + BLOCK_SIZE] for i in range(0, len(tokens), BLOCK_SIZE)]
        self._keys = block_keys(KeyScope("t", "f"), tokens, BLOCK_SIZE)
        self._num_blocks = num_blocks

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        began = time.thread_time()
        yield
        self.took[what] = (time.thread_time() - began) * 1e6 / self._num_blocks

    def run(self) -> dict[str, float]:
        pool = BlockPool(self._num_blocks, cache=True)
        with self._timed("allocate"):
            blocks = pool.allocate(self._num_blocks)
        assert blocks is not None
        with self._timed("retain"):
            pool.retain(blocks)
        pool.release(blocks)
        with self._timed("publish"):
            entries = self._publish(pool, blocks)
        with self._timed("release to cached"):
            pool.release(blocks)
        assert pool.cache is not None
        with self._timed("match"):
            found = pool.cache.match(self._keys, [t for block in self._tokens for t in block], BLOCK_SIZE)
        assert len(found) == len(entries) == self._num_blocks
        with self._timed("hold"):
            pool.hold(found)
        pool.release(blocks)
        with self._timed("allocate, evicting"):
            pool.allocate(self._num_blocks)
        with self._timed("release to free"):
            pool.release(blocks)
        return self.took

    def _publish(self, pool: BlockPool, blocks: tuple[int, ...]) -> list[Entry]:
        entries: list[Entry] = []
        parent: Entry | None = None
        for block_id, key, tokens in zip(blocks, self._keys, self._tokens, strict=True):
            parent = pool.publish(block_id, key, tokens, parent)
            assert parent is not None
            entries.append(parent)
        return entries


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--context", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--prefix-cache", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()
    total = 0.0
    for name, values in steps_us(args).items():
        median, p99 = statistics.median(values), statistics.quantiles(values, n=100)[98]
        total += median
        print(
            f"{name:9} {median:5.2f} us a sequence (median of {args.steps} steps), "
            f"least {min(values):5.2f}, p99 {p99:5.2f}"
        )
    print(f"a step of {args.sequences} sequences: {total * args.sequences / 1000:.2f} ms")
    rounds = [PoolRun(NUM_BLOCKS).run() for _ in range(5)]
    for name in rounds[0]:
        print(f"{name:18} {statistics.median(r[name] for r in rounds):5.2f} us a block")


if __name__ == "__main__":
    main()
