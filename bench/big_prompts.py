"""Do prompts of 5 MB hold up the tokens of other streams? The longest gaps with and without them, A B A B.

    python bench/big_prompts.py                              the model's tokenizer, 8 streams of 200 tokens a round
    python bench/big_prompts.py --executor hash --json

Other streams run all the time; in every second round a client in a process of its own sends prompts of --megabytes as
text, as chat and as token ids, one after another. All are longer than the context, so each must be refused by name.
Exit code 1 when a gap of a round with them is longer than --limit-ms beyond the longest of the rounds without.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path

from running import percentile, running

from kvrelay.client import AsyncClient, Client, Prompt
from kvrelay.errors import InvalidArgument

MODEL = "smollm2-135m-instruct"


@dataclass
class Figures:
    """Longest and 99th percentile gap of each round, in ms; how many prompts were refused in the rounds with them."""

    quiet_max_ms: list[float] = field(default_factory=list)
    quiet_p99_ms: list[float] = field(default_factory=list)
    beside_max_ms: list[float] = field(default_factory=list)
    beside_p99_ms: list[float] = field(default_factory=list)
    refused: int = 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--executor", default="torch", choices=("torch", "hash"))
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=200, help="of each stream and round")
    parser.add_argument("--rounds", type=int, default=2, help="of each kind")
    parser.add_argument("--megabytes", type=float, default=5.0)
    parser.add_argument("--limit-ms", type=float, default=250.0)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--send-to", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.send_to:
        return send(args.send_to, args.megabytes)
    figures = measure(args)
    more = max(figures.beside_max_ms) - max(figures.quiet_max_ms)
    if args.json:
        print(json.dumps(asdict(figures) | {"longer_ms": more}))
    else:
        show(figures, more)
    return 0 if more <= args.limit_ms and figures.refused else 1


def measure(args: argparse.Namespace) -> Figures:
    figures = Figures()
    served = ["--model", MODEL] if args.executor == "torch" else ["--executor", "hash", "--step-seconds", "0.02"]
    env = {"KVRELAY_MAX_REQUEST_BYTES": str(32 * 2**20)}
    with tempfile.TemporaryDirectory() as folder, running(served, env, Path(folder) / "log") as cluster:
        asyncio.run(one_round(cluster.target, args))  # warms up
        for _ in range(args.rounds):
            gaps = asyncio.run(one_round(cluster.target, args))
            figures.quiet_max_ms.append(max(gaps))
            figures.quiet_p99_ms.append(percentile(gaps, 0.99))
            gaps = beside(cluster.target, args, figures)
            figures.beside_max_ms.append(max(gaps))
            figures.beside_p99_ms.append(percentile(gaps, 0.99))
    return figures


def beside(target: str, args: argparse.Namespace, figures: Figures) -> list[float]:
    """The gaps of a round with big prompts."""
    command = [sys.executable, __file__, "--send-to", target, "--megabytes", str(args.megabytes)]
    sender = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        gaps = asyncio.run(one_round(target, args))
        told, _ = sender.communicate("stop\n", timeout=60)
    finally:
        sender.kill()
    figures.refused += int(told)
    return gaps


def send(target: str, megabytes: float) -> int:
    """Big prompts until a line comes on stdin; prints how many were refused by name."""
    text = "Once upon a time in a land far away. " * round(megabytes * 2**20 / 37)
    prompts: list[Prompt] = [text, [{"role": "user", "content": text}], [5] * (len(text) // 4)]
    stopping = subprocess.Popen(["head", "-n", "1"], stdin=sys.stdin, stdout=subprocess.DEVNULL)
    refused = 0
    with Client(target, timeout=60.0) as client:
        while stopping.poll() is None:
            for prompt in prompts:
                try:
                    with client.generate(prompt, max_tokens=4, deadline_s=60.0) as stream:
                        for _ in stream:
                            break
                except InvalidArgument:
                    refused += 1
    print(refused)
    return 0


async def one_round(target: str, args: argparse.Namespace) -> list[float]:
    """Gaps in ms of all streams, as their client saw them."""
    async with AsyncClient(target) as client:
        streams = [
            client.generate([number + 1] * 20, max_tokens=args.tokens, ignore_eos=True, deadline_s=120.0)
            for number in range(args.streams)
        ]
        results = await asyncio.gather(*(stream.collect() for stream in streams))
    return [gap for result in results for gap in result.gaps_ms]


def show(figures: Figures, more: float) -> None:
    rows = [
        ("longest gap without, ms", figures.quiet_max_ms),
        ("p99 without, ms", figures.quiet_p99_ms),
        ("longest gap beside them, ms", figures.beside_max_ms),
        ("p99 beside them, ms", figures.beside_p99_ms),
    ]
    for name, values in rows:
        print(f"{name:<30}", "  ".join(f"{value:8.1f}" for value in values))
    print(f"{'big prompts refused':<30} {figures.refused:8d}")
    print(f"{'longer by, ms':<30} {more:8.1f}")


if __name__ == "__main__":
    sys.exit(main())
