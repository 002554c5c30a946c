"""Split serving against aggregated serving on the same cores: TTFT, TBT and tokens/s for short, long and mixed prompts.

    python bench/aggregated.py                          the real model, two rounds of each shape, A B A B
    python bench/aggregated.py --executor hash --rounds 1

Split is one prefill and one decode worker with a thread each; aggregated is one decode worker with two threads that
computes prompts in its own batch (`kvrelay up --prefill 0`). Nothing else differs. Run it on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from running import running

from kvrelay.cli.bench_load import Prompt, Workload, random_prompts, run_load
from kvrelay.cli.bench_run import client_runner
from kvrelay.cli.bench_stats import describe
from kvrelay.client import AsyncClient

SHAPES = {
    "split": ("--prefill", "1", "--decode", "1", "--threads", "1"),
    "aggregated": ("--prefill", "0", "--decode", "1", "--threads", "2"),
}


@dataclass(frozen=True)
class Load:
    """prompt_tokens: the lengths of prompts, each equally often."""

    prompt_tokens: tuple[int, ...]
    output_tokens: int
    requests: int
    concurrency: int


LOADS = {
    "short": Load((64,), 96, 48, 8),
    "long": Load((1024,), 32, 12, 4),
    "mix": Load((64, 64, 64, 768), 64, 48, 8),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2, help="how often each shape is measured (default 2)")
    parser.add_argument("--executor", default="torch", choices=("torch", "hash"))
    parser.add_argument("--only", default="", help="loads whose name contains this")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for _ in range(arguments.rounds):
        for shape, flags in SHAPES.items():
            with (
                tempfile.TemporaryDirectory() as logs,
                running((*flags, "--executor", arguments.executor), {}, Path(logs) / "up.log") as cluster,
            ):
                for name, load in LOADS.items():
                    if arguments.only in name:
                        print(f"{shape}, {name} ...", file=sys.stderr, flush=True)
                        figures = asyncio.run(measure(cluster.target, load, seed=len(rows)))
                        rows.append({"load": name, "shape": shape, **figures})
    if arguments.json:
        print(json.dumps({"rounds": arguments.rounds, "executor": arguments.executor, "runs": rows}, indent=2))
    else:
        show(rows)


async def measure(target: str, load: Load, seed: int) -> dict[str, Any]:
    """One closed loop; two requests first that are not counted."""
    async with AsyncClient(target) as client:
        vocab, run = (await client.get_model()).vocab_size, client_runner(client)
        warm = random_prompts(2, 32, vocab, seed + 1000)
        await run_load(Workload(2, 32, 8, 2), warm, run, lambda: None)
        prompts = mixed(load, vocab, seed)
        work = Workload(load.requests, 0, load.output_tokens, load.concurrency)
        samples, wall_s = await run_load(work, prompts, run, lambda: None)
    return describe(samples, wall_s)


def mixed(load: Load, vocab_size: int, seed: int) -> list[Prompt]:
    """The same lengths in the same order for every shape."""
    lengths = [load.prompt_tokens[i % len(load.prompt_tokens)] for i in range(load.requests)]
    random.Random(0).shuffle(lengths)
    return [random_prompts(1, length, vocab_size, seed * 1000 + i)[0] for i, length in enumerate(lengths)]


def show(rows: list[dict[str, Any]]) -> None:
    columns = f"{'TTFT p50':>9} {'p99':>8} {'TBT p50':>8} {'p90':>7} {'p99':>7} {'tokens/s':>9} {'errors':>6}"
    print(f"{'load':6} {'shape':11} {columns}   (ms)")
    for row in sorted(rows, key=lambda r: (r["load"], r["shape"])):
        ttft, tbt = row["ttft_ms"], row["tbt_ms"]
        print(
            f"{row['load']:6} {row['shape']:11} {ttft['p50']:9.1f} {ttft['p99']:8.1f} {tbt['p50']:8.1f} "
            f"{tbt['p90']:7.1f} {tbt['p99']:7.1f} {row['output_tokens_per_s']:9.1f} {row['errors']:6}"
        )


if __name__ == "__main__":
    main()
