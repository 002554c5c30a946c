"""What a token costs the coordinator over gRPC and over HTTP: its CPU time, with many streams open at once.

    python bench/doors.py                             256 streams of 200 tokens a round, 3 rounds of each door
    python bench/doors.py --streams 32 --tokens 50 --rounds 1 --json

One cluster of the scripted model with both doors, one prefill and one decode worker; a step lasts --step-seconds and
makes a token of every stream. Streams come from client processes of their own; rounds go A B A B, and the coordinator's
clock in /proc is read around each. All it does is in it: taking requests in, hearing workers, journal, text, writing.
Exit code 1 if a median is over its limit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from running import Running, cpu_s_of, running

DOORS = ("grpc", "http")
SCRIPT = "The quick brown fox jumps over the lazy dog. "
END_S = 5.0


@dataclass
class Figures:
    """Microseconds of the coordinator's CPU a token, by door; cores: of it that were busy meanwhile."""

    streams: int
    tokens: int
    rounds: int
    us: dict[str, float] = field(default_factory=dict)
    of_rounds_us: dict[str, list[float]] = field(default_factory=lambda: {door: [] for door in DOORS})
    cores: dict[str, list[float]] = field(default_factory=lambda: {door: [] for door in DOORS})


class Clients:
    def __init__(self, processes: list[subprocess.Popen[str]]) -> None:
        self._processes = processes

    def run(self, door: str, streams: int, tokens: int) -> int:
        """Tokens that came over all streams. SystemExit when a stream did not bring all of its own."""
        count = len(self._processes)
        for number, process in enumerate(self._processes):
            share = streams * (number + 1) // count - streams * number // count
            _tell(process, {"door": door, "streams": share, "tokens": tokens})
        came = sum(int(_line(process)) for process in self._processes)
        if came != streams * tokens:
            raise SystemExit(f"{came} of {streams * tokens} tokens came over {door}")
        return came


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256, help="at once")
    parser.add_argument("--tokens", type=int, default=200, help="of each stream and round")
    parser.add_argument("--rounds", type=int, default=3, help="of each door")
    parser.add_argument("--clients", type=int, default=2, help="processes that open the streams")
    parser.add_argument("--step-seconds", type=float, default=0.1)
    parser.add_argument("--limit-us", type=float, nargs=2, default=(120.0, 240.0), metavar=("GRPC", "HTTP"))
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    args = parser.parse_args()
    figures = measure(args)
    if args.json:
        print(json.dumps(asdict(figures)))
    else:
        show(figures)
    return int(any(figures.us[door] > limit for door, limit in zip(DOORS, args.limit_us, strict=True)))


def measure(args: argparse.Namespace) -> Figures:
    figures = Figures(args.streams, args.tokens, args.rounds)
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.json"
        script.write_text(json.dumps(list((SCRIPT * (args.tokens // len(SCRIPT) + 1)).encode())))
        flags = ["--executor", "scripted", "--script", str(script), "--transport", "grpc", "--http", "127.0.0.1:0"]
        flags += ["--num-blocks", str(args.streams * (args.tokens // 16 + 6)), "--max-sequences", str(args.streams)]
        flags += ["--step-seconds", str(args.step_seconds)]
        with running(flags, {}, Path(folder) / "log") as cluster, clients_of(cluster, args.clients) as clients:
            for door in DOORS:  # the first round of each warms up
                clients.run(door, args.streams, min(args.tokens, 20))
            for _ in range(args.rounds):
                for door in DOORS:
                    us, cores = one_round(cluster, clients, door, args)
                    figures.of_rounds_us[door].append(us)
                    figures.cores[door].append(cores)
    figures.us = {door: round(statistics.median(values), 1) for door, values in figures.of_rounds_us.items()}
    return figures


def one_round(cluster: Running, clients: Clients, door: str, args: argparse.Namespace) -> tuple[float, float]:
    """(us a token, cores that were busy)."""
    pid = cluster.pids["coordinator"]
    used, began = cpu_s_of(pid), time.monotonic()
    tokens = clients.run(door, args.streams, args.tokens)
    cpu_s, seconds = cpu_s_of(pid) - used, time.monotonic() - began
    return round(1e6 * cpu_s / tokens, 1), round(cpu_s / seconds, 2)


@contextmanager
def clients_of(cluster: Running, count: int) -> Iterator[Clients]:
    program = str(Path(__file__).with_name("doors_client.py"))
    pipe = subprocess.PIPE
    with ExitStack() as stack:
        processes = []
        for _ in range(count):
            process = subprocess.Popen([sys.executable, program], stdin=pipe, stdout=pipe, text=True)
            stack.callback(_end, process)
            processes.append(process)
        for process in processes:
            _tell(process, {"target": cluster.target, "http": cluster.http})
        if any(_line(process) != "ready" for process in processes):
            raise SystemExit("a client process did not start")
        yield Clients(processes)


def _tell(process: subprocess.Popen[str], words: dict[str, object]) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(words) + "\n")
    process.stdin.flush()


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if not line:
        raise SystemExit("a client process died")
    return line


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait(END_S)


def show(figures: Figures) -> None:
    print(f"{figures.streams} streams of {figures.tokens} tokens, {figures.rounds} rounds of each door")
    print("coordinator, us of CPU a token: median (rounds), cores busy")
    for door in DOORS:
        rounds = " ".join(f"{us:.1f}" for us in figures.of_rounds_us[door])
        print(f"  {door:5} {figures.us[door]:7.1f}   ({rounds})   {statistics.median(figures.cores[door]):.2f}")


if __name__ == "__main__":
    sys.exit(main())
