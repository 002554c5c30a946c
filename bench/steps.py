"""What one engine costs, without any service around it: a decode step of N sequences, and prefilling a prompt.

    python bench/steps.py --model smollm2-135m-instruct --dtype bfloat16 --threads 1 [--json]

floor_ms: weights read once at the measured bandwidth (decode), or multiply-adds at the measured rate (prefill), both
measured here by the same process; see bench/kernels.py for single kernels.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

from engine.block_pool import BlockPool
from engine.budgets import Budgets
from engine.scheduler import Scheduler
from engine.torch_executor import TorchExecutor, TorchOptions
from kvrelay.models.catalog import resolve
from kvrelay.requests import RequestId, Sampling, SequenceKey, SequenceSpec, SessionId, StopRule


def spec(name: str, num_tokens: int, max_tokens: int) -> SequenceSpec:
    key = SequenceKey(SessionId("bench"), RequestId(name), 1)
    tokens = tuple((7 * i + len(name)) % 40_000 for i in range(num_tokens))
    return SequenceSpec(key, tokens, num_tokens, Sampling(0.0), StopRule(max_tokens))


def decode_ms(executor: TorchExecutor, num_sequences: int, context: int, steps: int) -> dict[str, float]:
    """Median and slowest milliseconds of a step in which every sequence decodes one token."""
    pool = BlockPool(executor.pool.num_blocks)
    scheduler = Scheduler(pool, 16, Budgets(max_tokens=4096))
    for i in range(num_sequences):
        scheduler.add(spec(str(i), context, steps + 8))
    times = []
    while scheduler.has_work:
        plan = scheduler.schedule()
        if plan is None:
            break
        started = time.perf_counter()
        result = executor.run(plan)
        elapsed = time.perf_counter() - started
        if plan.num_tokens == num_sequences:
            times.append(elapsed * 1e3)
        scheduler.apply(plan, result)
    return {
        "p50_ms": statistics.median(times),
        "max_ms": max(times),
        "tokens_per_s": num_sequences * 1e3 / statistics.median(times),
    }


def prefill_ms(executor: TorchExecutor, num_tokens: int, step_tokens: int, rounds: int = 3) -> dict[str, float]:
    """Median milliseconds to compute a prompt in chunks of step_tokens."""
    times = []
    for i in range(rounds):
        scheduler = Scheduler(BlockPool(executor.pool.num_blocks), 16, Budgets(max_tokens=step_tokens))
        scheduler.add(spec(f"p{i}", num_tokens, 1))
        started = time.perf_counter()
        while (plan := scheduler.schedule()) is not None:
            scheduler.apply(plan, executor.run(plan))
        times.append((time.perf_counter() - started) * 1e3)
    median = statistics.median(times)
    return {"p50_ms": median, "tokens_per_s": num_tokens * 1e3 / median}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    executor = TorchExecutor(resolve(args.model), TorchOptions(args.dtype, 1024, 16, args.threads))
    rows: dict[str, dict[str, float]] = {}
    for num_sequences, context in ((1, 128), (8, 200), (32, 160)):
        rows[f"decode {num_sequences} x {context}"] = decode_ms(executor, num_sequences, context, args.steps)
    for num_tokens in (128, 1024):
        rows[f"prefill {num_tokens}"] = prefill_ms(executor, num_tokens, 512)
    executor.close()
    if args.json:
        print(json.dumps(rows))
        return
    for name, figures in rows.items():
        print(f"{name:18}", "  ".join(f"{k} {v:9.2f}" for k, v in figures.items()))


if __name__ == "__main__":
    main()
