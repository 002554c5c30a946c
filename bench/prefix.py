"""What finding a prompt in the workers' caches costs the coordinator: its blocks' keys, and looking them up.

python bench/prefix.py [--blocks 2000] [--workers 8] [--runs 200] [--json FILE]

Each worker caches a beginning of the prompt, the first one all of it, and as many other blocks as --others. Keys are
made once a request and not on the event loop; the look-up is made by the router. CPU time of the thread that does it.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable
from pathlib import Path

from running import percentile

from coordinator.prefix_index import PrefixIndex
from kvrelay.blocks import BlockEventKind, BlockEvents, BlockKey, BlockRun, KeyScope, block_keys
from kvrelay.requests import WorkerId

BLOCK_SIZE = 16
LIMITS_MS = {"keys": 6.0, "look-up, all cached": 1.0, "look-up, half cached": 1.0, "look-up, nothing cached": 1.0}


def prompt(blocks: int, first: int = 0) -> tuple[int, ...]:
    return tuple((first + 7 * i) % 50_000 for i in range(blocks * BLOCK_SIZE))


def keys_of(token_ids: tuple[int, ...]) -> tuple[BlockKey, ...]:
    return block_keys(KeyScope("default", "fingerprint"), token_ids, BLOCK_SIZE)


def filled(keys: tuple[BlockKey, ...], workers: int, others: int) -> PrefixIndex:
    index = PrefixIndex()
    for number in range(workers):
        own = keys_of(prompt(others, first=number + 1)) + keys[: len(keys) // (number + 1)]
        index.apply(WorkerId(f"w{number}"), BlockEvents(1, (BlockRun(BlockEventKind.STORED, own),)))
    return index


def times_ms(work: Callable[[], object], runs: int) -> list[float]:
    taken = []
    for _ in range(runs):
        t0 = time.thread_time()
        work()
        taken.append((time.thread_time() - t0) * 1e3)
    return taken


def measure(blocks: int, workers: int, others: int, runs: int) -> dict[str, dict[str, float]]:
    token_ids = prompt(blocks)
    keys = keys_of(token_ids)
    half = keys[: blocks // 2] + keys_of(prompt(blocks - blocks // 2, first=-1))
    nothing = keys_of(prompt(blocks, first=-2))
    index = filled(keys, workers, others)
    jobs: dict[str, Callable[[], object]] = {
        "keys": lambda: keys_of(token_ids),
        "look-up, all cached": lambda: index.depths(keys),
        "look-up, half cached": lambda: index.depths(half),
        "look-up, nothing cached": lambda: index.depths(nothing),
        "its blocks stored by one more": lambda: _store_and_forget(index, keys),
    }
    gc.freeze()  # as a coordinator does: the index is no garbage to look through
    taken = {name: times_ms(job, runs) for name, job in jobs.items()}
    return {name: {"p50_ms": percentile(ms, 0.5), "p99_ms": percentile(ms, 0.99)} for name, ms in taken.items()}


def _store_and_forget(index: PrefixIndex, keys: tuple[BlockKey, ...]) -> None:
    worker = WorkerId("late")
    index.apply(worker, BlockEvents(1, (BlockRun(BlockEventKind.STORED, keys),)))
    index.forget(worker)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=2000, help="full blocks of the prompt (default 2000)")
    parser.add_argument("--workers", type=int, default=8, help="that cache a part of it (default 8)")
    parser.add_argument("--others", type=int, default=10_000, help="other blocks that each caches (default 10000)")
    parser.add_argument("--runs", type=int, default=200, help="measurements of each (default 200)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here as well")
    args = parser.parse_args()
    figures = measure(args.blocks, args.workers, args.others, args.runs)
    print(f"{args.blocks} blocks of {BLOCK_SIZE} tokens, {args.workers} workers, {args.runs} runs")
    print(f"{'':32} {'p50 ms':>8} {'p99 ms':>8} {'limit':>6}")
    for name, row in figures.items():
        limit = f"{LIMITS_MS[name]:6.1f}" if name in LIMITS_MS else "     -"
        print(f"{name:32} {row['p50_ms']:8.3f} {row['p99_ms']:8.3f} {limit}")
    if args.json is not None:
        args.json.write_text(json.dumps({"arguments": vars(args) | {"json": str(args.json)}, "figures": figures}))


if __name__ == "__main__":
    main()
