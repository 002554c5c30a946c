"""How workers are chosen, compared on conversations: prompt tokens computed, hit rate and TTFT of each policy.

    python bench/routing.py                              2 + 2 workers, hash executor, two rounds A B C D A B C D
    python bench/routing.py --rounds 1 --conversations 8 --json routing.json

Each conversation sends its whole history with every turn: what it asked, what it was answered, and a new question. The
pools of either role hold all histories once and not twice, so a policy that sends turns anywhere computes them again
and throws out others. A step takes --step-seconds whatever is in it; 128 tokens fit. Answers must be the same whatever
the policy: exit 1 if not. Run it on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from running import percentile, running

from kvrelay.client import AsyncClient
from kvrelay.config import ROUTERS

BLOCK_SIZE = 16
STEP_TOKENS = 128
SPARE = 1.2
"""Blocks of the pools of a role against those of all histories."""


@dataclass(frozen=True)
class Talks:
    """The load. first: tokens of a conversation's first question, then: of each later one."""

    conversations: int
    turns: int
    first: int
    then: int
    answer: int
    pause_s: float

    @property
    def history_blocks(self) -> int:
        """Of one conversation at its end."""
        tokens = self.first + (self.turns - 1) * self.then + self.turns * self.answer
        return -(-tokens // BLOCK_SIZE)

    def pool(self, workers: int) -> int:
        return int(SPARE * self.conversations * self.history_blocks / workers)


@dataclass
class Seen:
    """What one policy made of the load."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    ttft_ms: list[float] = field(default_factory=list)
    later_ttft_ms: list[float] = field(default_factory=list)
    answers: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    wall_s: float = 0.0

    def figures(self) -> dict[str, float]:
        return {
            "computed_tokens": self.prompt_tokens - self.cached_tokens,
            "hit_rate": self.cached_tokens / self.prompt_tokens,
            "ttft_p50_ms": percentile(self.ttft_ms, 0.5),
            "ttft_p99_ms": percentile(self.ttft_ms, 0.99),
            "later_turns_ttft_p50_ms": percentile(self.later_ttft_ms, 0.5),
            "wall_s": self.wall_s,
        }


async def talk(client: AsyncClient, talks: Talks, number: int, seen: Seen) -> None:
    """One conversation from its first question to its last answer."""
    rng = random.Random(number)
    history: list[int] = []
    await asyncio.sleep(rng.uniform(0.0, talks.pause_s))
    for turn in range(talks.turns):
        history += [rng.randrange(256) for _ in range(talks.then if turn else talks.first)]
        options: dict[str, Any] = {"max_tokens": talks.answer, "ignore_eos": True, "temperature": 0.0}
        result = await client.generate(history, **options).collect()
        assert result.ttft_ms is not None
        seen.prompt_tokens += result.usage.prompt_tokens
        seen.cached_tokens += result.usage.cached_tokens
        seen.ttft_ms.append(result.ttft_ms)
        if turn:
            seen.later_ttft_ms.append(result.ttft_ms)
        seen.answers[number, turn] = result.token_ids
        history += result.token_ids
        await asyncio.sleep(rng.uniform(0.5, 1.5) * talks.pause_s)


async def converse(target: str, talks: Talks) -> Seen:
    seen, started = Seen(), time.monotonic()
    async with AsyncClient(target, timeout=120.0) as client:
        await asyncio.gather(*(talk(client, talks, number, seen) for number in range(talks.conversations)))
    seen.wall_s = time.monotonic() - started
    return seen


def rounds(arguments: argparse.Namespace, talks: Talks) -> Iterator[tuple[str, Seen]]:
    """(policy, what came of it), each in a cluster of its own with empty caches."""
    workers = arguments.workers
    cluster = ("--prefill", str(workers), "--decode", str(workers), "--executor", "hash", "--transport", "grpc")
    sizes = ("--num-blocks", str(talks.pool(workers)), "--step-tokens", str(STEP_TOKENS))
    pace = ("--step-seconds", str(arguments.step_seconds))
    for number in range(arguments.rounds):
        for policy in arguments.policies:
            print(f"round {number + 1}, {policy} ...", file=sys.stderr, flush=True)
            with tempfile.TemporaryDirectory() as logs:
                flags = (*cluster, *sizes, *pace, "--router", policy)
                with running(flags, {}, Path(logs) / "up.log") as up:
                    yield policy, asyncio.run(converse(up.target, talks))


def show(talks: Talks, workers: int, rows: Sequence[dict[str, Any]]) -> None:
    print(
        f"{talks.conversations} conversations of {talks.turns} turns, {workers} + {workers} workers with "
        f"{talks.pool(workers)} blocks each; a history ends with {talks.history_blocks} blocks"
    )
    columns = f"{'computed':>9} {'hits':>6} {'TTFT p50':>9} {'p99':>8} {'p50 of later turns':>19}"
    print(f"{'policy':13} {columns}   (tokens, ms)")
    for row in rows:
        print(
            f"{row['policy']:13} {row['computed_tokens']:9} {row['hit_rate']:6.1%} {row['ttft_p50_ms']:9.1f} "
            f"{row['ttft_p99_ms']:8.1f} {row['later_turns_ttft_p50_ms']:19.1f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2, help="how often each policy is measured (default 2)")
    parser.add_argument("--policies", nargs="+", choices=ROUTERS, default=list(ROUTERS), help="default: all")
    parser.add_argument("--workers", type=int, default=2, help="of each role (default 2)")
    parser.add_argument("--conversations", type=int, default=16, help="at once (default 16)")
    parser.add_argument("--turns", type=int, default=8, help="of each conversation (default 8)")
    parser.add_argument("--step-seconds", type=float, default=0.01, help="duration of a step (default 0.01)")
    parser.add_argument("--pause", type=float, default=0.5, help="seconds between turns, on average (default 0.5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here as well")
    arguments = parser.parse_args()
    talks = Talks(arguments.conversations, arguments.turns, 400, 60, 32, arguments.pause)
    rows: list[dict[str, Any]] = []
    answers: dict[tuple[int, int], tuple[int, ...]] | None = None
    same = True
    for policy, seen in rounds(arguments, talks):
        rows.append({"policy": policy, **seen.figures()})
        answers = answers or seen.answers
        same = same and seen.answers == answers
    show(talks, arguments.workers, rows)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"same_answers": same, "runs": rows}, indent=2))
    if not same:
        raise SystemExit("answers differ from policy to policy")


if __name__ == "__main__":
    main()
