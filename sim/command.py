"""The command line of the simulator: seeds spread over processes, a table at the end. Knows no cluster."""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

CHUNKS_A_PROCESS = 10
"""Of four seeds each; then a fresh process goes on, since what a world leaves behind makes the next one slower."""
EXAMPLES = """examples:
  python -m sim --seeds 100 --jobs 2      100 seeds; exit 1 and the seed's number on a violation
  python -m sim --seed 4711 --trace       replay one seed and see everything that happens
"""


def main() -> int:
    options = _parser().parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.execve(sys.executable, [sys.executable, "-m", "sim", *sys.argv[1:]], {**os.environ, "PYTHONHASHSEED": "0"})
    _quiet_logs(options.trace)
    seeds = [options.seed] if options.seed is not None else range(options.first, options.first + options.seeds)
    return _run(seeds, options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m sim",
        description="The whole cluster in one thread on virtual time, with faults. Each seed is one life of a cluster.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", type=int, default=100, help="how many (default 100)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument("--seed", type=int, help="only this one")
    parser.add_argument("--trace", action="store_true", help="print what happens, line by line")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one per core)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def _run(seeds: Iterable[int], options: argparse.Namespace) -> int:
    began = time.perf_counter()
    outcomes: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    counters: Counter[str] = Counter()
    violations: list[tuple[int, str]] = []
    done, virtual_s = 0, 0.0
    for outcome in _outcomes(list(seeds), options):
        done += 1
        virtual_s += outcome.virtual_s
        outcomes += outcome.outcomes
        faults += outcome.faults
        counters += outcome.counters
        if outcome.violation:
            violations.append((outcome.seed, outcome.violation))
            _show_violation(outcome, options)
        if not options.json and sys.stderr.isatty():
            print(f"\r{done} seeds, {len(violations)} violations", end="", file=sys.stderr)
    if not options.json and sys.stderr.isatty():
        print(file=sys.stderr)
    seconds = time.perf_counter() - began
    result = {
        "seeds": done,
        "violations": [{"seed": seed, "what": what} for seed, what in violations],
        "requests": dict(outcomes),
        "faults": dict(faults),
        "counters": dict(counters),
        "virtual_s": round(virtual_s, 1),
        "seconds": round(seconds, 1),
    }
    print(json.dumps(result) if options.json else _table(result))
    return 1 if violations else 0


def _outcomes(seeds: list[int], options: argparse.Namespace) -> Iterator[Any]:
    from sim.cluster import run_seed

    if len(seeds) == 1 or options.jobs == 1:
        show = print if options.trace else None
        yield from (run_seed(seed, show) for seed in seeds)
        return
    with multiprocessing.get_context("fork").Pool(options.jobs, maxtasksperchild=CHUNKS_A_PROCESS) as pool:
        yield from pool.imap_unordered(run_seed, seeds, chunksize=4)


def _show_violation(outcome: Any, options: argparse.Namespace) -> None:
    if not options.trace:
        print("\n".join(outcome.recent[-60:]), file=sys.stderr)
    print(f"seed {outcome.seed}: {outcome.violation}", file=sys.stderr)
    print(f"replay: python -m sim --seed {outcome.seed} --trace", file=sys.stderr)


def _table(result: dict[str, Any]) -> str:
    lines = [f"{result['seeds']} seeds, {len(result['violations'])} violations, {result['virtual_s']:.0f} virtual s"]
    lines[0] += f" in {result['seconds']:.0f} s"
    for title in ("requests", "faults", "counters"):
        pairs = ", ".join(f"{name} {count}" for name, count in sorted(result[title].items()))
        lines.append(f"{title}: {pairs or 'none'}")
    return "\n".join(lines)


def _quiet_logs(trace: bool) -> None:
    """The code under test logs into the trace, in virtual time, or nowhere."""
    import structlog

    from sim.world import log_into_trace

    level = logging.INFO if trace else logging.CRITICAL
    structlog.configure(
        processors=[structlog.processors.format_exc_info, log_into_trace],
        wrapper_class=structlog.make_filtering_bound_logger(level),
    )
