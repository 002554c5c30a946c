"""What a step costs in the scheduler alone: microseconds of CPU a sequence, no model behind it.

python bench/scheduler.py [--sequences 256] [--context 1000] [--steps 300]
"""

from __future__ import annotations

import argparse
import statistics
import time

from engine.block_pool import BlockPool
from engine.plan import Result
from engine.scheduler import Budgets, Scheduler
from kvrelay.requests import RequestId, Sampling, SequenceKey, SequenceSpec, SessionId, StopRule

BLOCK_SIZE = 16


def spec(number: int, context: int, steps: int) -> SequenceSpec:
    key = SequenceKey(SessionId("bench"), RequestId(f"r{number}"), 1)
    return SequenceSpec(
        key, tuple(range(context)), context, Sampling(seed=number), StopRule(steps + 10, frozenset({0}))
    )


def loaded(sequences: int, context: int, steps: int) -> Scheduler:
    """A scheduler whose sequences have all been handed over: each has one token to compute.

    Lengths are spread, so that a sixteenth of the sequences needs a new block in each step."""
    pool = BlockPool(sequences * ((context + steps + 30) // BLOCK_SIZE + 2))
    scheduler = Scheduler(pool, BLOCK_SIZE, Budgets(max_tokens=sequences, max_sequences=sequences))
    for number in range(sequences):
        length = context + number % BLOCK_SIZE
        blocks = pool.allocate(length // BLOCK_SIZE + 1)
        assert blocks is not None
        scheduler.add(spec(number, length, steps), block_ids=blocks, num_computed=length - 1)
    return scheduler


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--context", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    scheduler = loaded(args.sequences, args.context, args.steps)
    schedule_us, apply_us = [], []
    for _ in range(args.steps):
        t0 = time.thread_time()
        plan = scheduler.schedule()
        t1 = time.thread_time()
        assert plan is not None
        result = Result(plan.step_id, (7,) * len(plan.slices))
        t2 = time.thread_time()
        scheduler.apply(plan, result)
        t3 = time.thread_time()
        schedule_us.append((t1 - t0) * 1e6 / args.sequences)
        apply_us.append((t3 - t2) * 1e6 / args.sequences)
    for name, values in (("schedule", schedule_us), ("apply", apply_us)):
        p99 = statistics.quantiles(values, n=100)[98]
        print(f"{name:9} {statistics.median(values):5.2f} us a sequence (median of {args.steps} steps), p99 {p99:5.2f}")


if __name__ == "__main__":
    main()
