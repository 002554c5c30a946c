"""What full tracing costs a token: CPU time of the cluster's processes, with tracing on and off by turns.

    python bench/tracing.py                        32 streams of 300 tokens a round, 4 rounds of each kind
    python bench/tracing.py --streams 8 --json

Two clusters of the hash model are up, one with --trace-dir, one without; rounds go A B A B, and the process clocks are
read around each. What a process takes more a token with tracing is what tracing costs it. With --with-metrics the
traced one serves metrics too, for which it sums up the causes of all gaps. Exit code 1 if all processes together cost
more than --limit-us.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from running import Running, running

from kvrelay.client import AsyncClient

SETTLE_S = 1.5
"""After a round: what is exported late still belongs to it."""


@dataclass
class Figures:
    """Microseconds of CPU a token: by process, with tracing, without, and the difference of the medians."""

    streams: int
    tokens: int
    rounds: int
    on_us: dict[str, float] = field(default_factory=dict)
    off_us: dict[str, float] = field(default_factory=dict)
    more_us: dict[str, float] = field(default_factory=dict)
    total_more_us: float = 0.0
    of_rounds_us: dict[str, list[float]] = field(default_factory=dict)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=300, help="of each stream and round")
    parser.add_argument("--rounds", type=int, default=4, help="of each kind")
    parser.add_argument("--step-seconds", type=float, default=0.004)
    parser.add_argument("--with-metrics", action="store_true", help="the traced one serves metrics as well")
    parser.add_argument("--limit-us", type=float, default=5.0, help="of CPU a token, beyond which it fails")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    args = parser.parse_args()
    figures = measure(args)
    if args.json:
        print(json.dumps(asdict(figures)))
    else:
        show(figures)
    return 0 if figures.total_more_us <= args.limit_us else 1


def measure(args: argparse.Namespace) -> Figures:
    figures = Figures(args.streams, args.tokens, args.rounds)
    common = ["--executor", "hash", "--transport", "grpc", "--step-seconds", str(args.step_seconds)]
    with tempfile.TemporaryDirectory() as folder:
        traced = [*common, "--trace-dir", f"{folder}/traces"]
        if args.with_metrics:
            traced += ["--metrics", "127.0.0.1:0"]
        with (
            running(traced, {}, Path(folder) / "on.log") as on,
            running(common, {}, Path(folder) / "off.log") as off,
        ):
            for cluster in (on, off):  # the first round of each warms up
                one_round(cluster, args)
            rounds: dict[str, list[dict[str, float]]] = {"on": [], "off": []}
            for number in range(args.rounds):
                rounds["on"].append(one_round(on, args))
                rounds["off"].append(one_round(off, args))
                print(f"round {number + 1} of {args.rounds}", file=sys.stderr)
    for process in rounds["on"][0]:
        figures.on_us[process] = statistics.median(each[process] for each in rounds["on"])
        figures.off_us[process] = statistics.median(each[process] for each in rounds["off"])
        figures.more_us[process] = figures.on_us[process] - figures.off_us[process]
    figures.total_more_us = sum(figures.more_us.values())
    figures.of_rounds_us = {kind: [sum(each.values()) for each in all_of] for kind, all_of in rounds.items()}
    return figures


def one_round(cluster: Running, args: argparse.Namespace) -> dict[str, float]:
    """CPU microseconds a token of each process."""
    before = cpu_s(cluster)
    asyncio.run(load(cluster.target, args.streams, args.tokens))
    time.sleep(SETTLE_S)
    after = cpu_s(cluster)
    tokens = args.streams * args.tokens
    return {name: (after[name] - before[name]) / tokens * 1e6 for name in before}


def cpu_s(cluster: Running) -> dict[str, float]:
    """By the scheduler's account, in nanoseconds, of all threads: none ends meanwhile."""
    return {name: sum(map(_thread_s, Path(f"/proc/{pid}/task").iterdir())) for name, pid in cluster.pids.items()}


def _thread_s(task: Path) -> float:
    return int((task / "schedstat").read_text().split()[0]) / 1e9


async def load(target: str, streams: int, tokens: int) -> None:
    async with AsyncClient(target) as client:

        async def one(number: int) -> None:
            count = 0
            async for _ in client.generate(f"stream {number}", max_tokens=tokens, ignore_eos=True, temperature=0.0):
                count += 1
            if count != tokens:
                raise SystemExit(f"a stream had {count} tokens of {tokens}")

        await asyncio.gather(*(one(number) for number in range(streams)))


def show(figures: Figures) -> None:
    print(f"{figures.streams} streams of {figures.tokens} tokens, {figures.rounds} rounds of each kind; CPU us a token")
    print(f"{'process':<14}{'traced':>9}{'not':>9}{'more':>9}")
    for process, more in figures.more_us.items():
        print(f"{process:<14}{figures.on_us[process]:>9.2f}{figures.off_us[process]:>9.2f}{more:>9.2f}")
    print(f"{'all':<14}{sum(figures.on_us.values()):>9.2f}{sum(figures.off_us.values()):>9.2f}", end="")
    print(f"{figures.total_more_us:>9.2f}")


if __name__ == "__main__":
    sys.exit(main())
