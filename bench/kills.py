"""Kills workers for real, one after another, under a steady load, and says what became of every stream.

    python bench/kills.py                                       100 prefill and 100 decode workers, 40 with the model
    python bench/kills.py --prefill 10 --decode 10 --model-kills 0 --json

Two prefill and two decode workers; SIGKILL at random moments, the next one once the last worker is back and serving.
Clients' histories are judged by the checker of tests/faults: each stream must be, token for token, what one process
gives, or (1 in 100) end UNAVAILABLE within 5 s of a kill. Exit code 1: a violation, more than that, or a leak.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.golden import Case, references
from support.history import Reference, Stream, Tally, judge, tally
from support.injections import NoProof, born_again, kill
from support.members import Members, members
from support.recorder import HashReference, History, load, under_way
from support.streams import new_and_known

from kvrelay.cli import bench_stats

MODEL = "smollm2-135m-instruct"
MODEL_SIZES = ((40, 40), (200, 24), (17, 32), (300, 16), (1, 40), (16, 32))
MODEL_ROUNDS = 6
"""So many prompts of each size: more tokens than a pool holds, so that most of what is handed over was in no cache."""
BACK_WITHIN_S = 60.0
LONGEST_WAIT_S = 0.5
"""Between two kills, besides the time that the killed worker needs to come back."""


class ModelReference:
    """One process with the real model: its answers to the cases are computed once, at the start."""

    def __init__(self, cases: Sequence[Case], dtype: str) -> None:
        from coordinator.text import HuggingFaceCodec
        from engine.torch_executor import TorchExecutor, TorchOptions
        from kvrelay.models.catalog import resolve
        from kvrelay.models.config import ModelConfig

        directory = resolve(MODEL)
        executor = TorchExecutor(directory, TorchOptions(dtype=dtype, num_blocks=128, threads=2))
        self._codec = HuggingFaceCodec(directory, ModelConfig.from_dir(directory).vocab)
        self._answers = dict(zip(cases, references(executor, cases), strict=True))
        executor.close()

    def tokens(self, case: Case) -> tuple[int, ...]:
        return self._answers[case]

    def text(self, token_ids: Sequence[int]) -> str:
        return self._codec.decode(token_ids)


def model_cases() -> list[Case]:
    """Random tokens of SmolLM2's vocabulary, greedy and seeded in turn."""
    rng = random.Random(7)
    return [
        Case(tuple(rng.randrange(49_152) for _ in range(length)), max_tokens, 7 + i if i % 2 else None)
        for i, (length, max_tokens) in enumerate(MODEL_SIZES * MODEL_ROUNDS)
    ]


@dataclass(frozen=True, slots=True)
class Setting:
    """What is served, what is asked of it, and what one process answers."""

    name: str
    flags: tuple[str, ...]
    cases: Iterable[Case]
    reference: Reference
    concurrency: int


@dataclass(slots=True)
class Outcome:
    """What was seen. recoveries_s: from a kill until that worker serves again; gaps: longest silence of a stream."""

    tally: Tally = field(default_factory=Tally)
    proven: dict[str, int] = field(default_factory=lambda: {"prefill": 0, "decode": 0})
    unproven: list[str] = field(default_factory=list)
    recoveries_s: list[float] = field(default_factory=list)
    moved_gaps_s: list[float] = field(default_factory=list)
    other_gaps_s: list[float] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    blocks: dict[str, dict[str, int]] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        broken = self.tally.violations or self.unproven or self.leaks
        return not broken and self.tally.within_budget

    def take(self, history: History, reference: Reference, *, running: bool = False) -> None:
        """Judge the streams that have ended (all of them if not `running`), and let go of them."""
        ended = [a for a in history.asked if not running or a.has_ended]
        history.asked = [a for a in history.asked if a not in ended]
        verdicts = judge([a.stream() for a in ended], history.faults, reference)
        self.tally += tally(verdicts)
        for verdict in verdicts:
            self._note_gap(verdict.stream)

    def _note_gap(self, stream: Stream) -> None:
        if stream.finish is not None:
            gaps = self.moved_gaps_s if stream.finish.migrations else self.other_gaps_s
            gaps.append(stream.longest_gap_s)


async def run(setting: Setting, cluster: Members, roles: Sequence[str], rng: random.Random) -> Outcome:
    outcome, history = Outcome(), History()
    began = time.monotonic()
    async with load(cluster.target, setting.cases, setting.concurrency, history):
        await under_way(history)
        for number, role in enumerate(roles, 1):
            await asyncio.sleep(rng.uniform(0.0, LONGEST_WAIT_S))
            await kill_one(cluster, f"{role[0]}{rng.randrange(2)}", role, history, outcome)
            outcome.take(history, setting.reference, running=True)
            say_progress(setting, number, len(roles), outcome)
    outcome.take(history, setting.reference)
    try:
        await asyncio.to_thread(cluster.until_quiet)
    except AssertionError as leak:
        outcome.leaks.append(str(leak))
    outcome.blocks = {w["id"]: w["blocks"] for w in cluster.view.workers()}
    outcome.seconds = time.monotonic() - began
    return outcome


async def kill_one(cluster: Members, victim: str, role: str, history: History, outcome: Outcome) -> None:
    """SIGKILL, the same command again, and wait until it serves. Without proof of both it does not count."""
    try:
        fault = await asyncio.to_thread(kill, cluster.view, cluster.workers[victim].pid)
        history.faults.append(fault)
        await asyncio.to_thread(cluster.revive, victim)
        await asyncio.to_thread(born_again, cluster.view, victim, fault.proof["incarnation"], BACK_WITHIN_S)
    except NoProof as why:
        outcome.unproven.append(str(why))
        return
    outcome.proven[role] += 1
    outcome.recoveries_s.append(time.monotonic() - fault.began_at)


def say_progress(setting: Setting, number: int, total: int, outcome: Outcome) -> None:
    t = outcome.tally
    said = f"{setting.name}: kill {number} of {total}; streams: {t.exact} exact, {t.unavailable} unavailable"
    end = "\n" if number == total or not sys.stderr.isatty() else "\r"
    print(f"{said}, {len(t.violations)} violations", end=end, file=sys.stderr, flush=True)


def report(name: str, outcome: Outcome) -> dict[str, Any]:
    """The figures of one setting, as JSON shows them."""
    return {
        "executor": name,
        "kills_with_proof": outcome.proven,
        "kills_without_proof": outcome.unproven,
        "streams": asdict(outcome.tally),
        "moved_streams": len(outcome.moved_gaps_s),
        "worst_recovery_s": max(outcome.recoveries_s, default=0.0),
        "median_recovery_s": percentile(outcome.recoveries_s, 50),
        "stall_of_moved_streams_s": {
            "p50": percentile(outcome.moved_gaps_s, 50),
            "p99": percentile(outcome.moved_gaps_s, 99),
        },
        "longest_gap_of_other_streams_s": {
            "p50": percentile(outcome.other_gaps_s, 50),
            "p99": percentile(outcome.other_gaps_s, 99),
        },
        "leaks": outcome.leaks,
        "blocks_at_the_end": outcome.blocks,
        "seconds": outcome.seconds,
        "passed": outcome.passed,
    }


def percentile(values: Sequence[float], percent: int) -> float:
    """As `kvrelay bench` counts it; 0 of nothing."""
    return bench_stats.percentile(values, percent) if values else 0.0


def table(row: dict[str, Any]) -> str:
    streams, kills = row["streams"], row["kills_with_proof"]
    blocks = [f"{k} {b['free'] + b['cached']}/{b['total']}" for k, b in sorted(row["blocks_at_the_end"].items())]
    stall, other = row["stall_of_moved_streams_s"], row["longest_gap_of_other_streams_s"]
    lines = [
        ("kills with proof", f"{kills['prefill']} prefill, {kills['decode']} decode"),
        ("kills without proof", str(len(row["kills_without_proof"]))),
        ("streams exact", f"{streams['exact']}, of which {row['moved_streams']} were moved"),
        ("streams unavailable", str(streams["unavailable"])),
        ("violations", str(len(streams["violations"]))),
        (
            "killed worker serves again",
            f"median {row['median_recovery_s']:.2f} s, worst {row['worst_recovery_s']:.2f} s",
        ),
        ("stall of moved streams", f"p50 {stall['p50']:.2f} s, p99 {stall['p99']:.2f} s"),
        ("longest gap of others", f"p50 {other['p50']:.2f} s, p99 {other['p99']:.2f} s"),
        ("blocks free or cached", ", ".join(blocks)),
        ("time", f"{row['seconds']:.0f} s"),
    ]
    problems = [*streams["violations"], *row["kills_without_proof"], *row["leaks"]]
    text = "\n".join(f"  {name:<28}{value}" for name, value in lines)
    return "\n".join([f"{row['executor']}: {'passed' if row['passed'] else 'FAILED'}", text, *problems[:20]])


def share(kills: int, model_kills: int, total: int) -> int:
    """How many of one role's kills are done with the model."""
    return round(model_kills * kills / total) if total else 0


def settings(args: argparse.Namespace) -> list[tuple[Setting, list[str]]]:
    """What to run, and the roles to kill in it, in random order."""
    total = args.prefill + args.decode
    model = {role: share(n, min(args.model_kills, total), total) for role, n in roles_of(args).items()}
    found = []
    common: tuple[str, ...] = ("--transport", args.transport)
    plain = {role: n - model[role] for role, n in roles_of(args).items()}
    if sum(plain.values()):
        plain_flags = (*common, "--num-blocks", "160", "--step-tokens", "64", "--step-seconds", "0.01")
        found.append((Setting("hash", plain_flags, new_and_known(), HashReference(), args.concurrency), plain))
    if sum(model.values()):
        cases = model_cases()
        flags = (*common, "--executor", "torch", "--model", MODEL, "--dtype", args.dtype, "--num-blocks", "160")
        reference = ModelReference(cases, args.dtype)
        found.append((Setting(f"{MODEL} {args.dtype}", flags, cases, reference, args.model_concurrency), model))
    rng = random.Random(args.seed)
    return [(setting, shuffled(counts, rng)) for setting, counts in found]


def roles_of(args: argparse.Namespace) -> dict[str, int]:
    return {"prefill": args.prefill, "decode": args.decode}


def shuffled(counts: dict[str, int], rng: random.Random) -> list[str]:
    roles = [role for role, count in counts.items() for _ in range(count)]
    rng.shuffle(roles)
    return roles


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefill", type=int, default=100, help="kills of prefill workers (default 100)")
    parser.add_argument("--decode", type=int, default=100, help="kills of decode workers (default 100)")
    parser.add_argument(
        "--model-kills", type=int, default=40, help=f"of all kills, those that meet {MODEL} (default 40)"
    )
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="of the model")
    parser.add_argument("--transport", default="nixl", choices=("nixl", "grpc"))
    parser.add_argument("--concurrency", type=int, default=8, help="streams at any time, hash executor (default 8)")
    parser.add_argument("--model-concurrency", type=int, default=6, help="streams at any time, model (default 6)")
    parser.add_argument("--seed", type=int, default=1, help="of the order and moments of the kills")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    args = parser.parse_args()
    # Our kernels give the same bits whatever the batch; a library's need not.
    os.environ["KVRELAY_LINEAR"] = "native"
    rows = []
    for setting, roles in settings(args):
        with tempfile.TemporaryDirectory() as logs, members(Path(logs), common=setting.flags) as cluster:
            rows.append(report(setting.name, asyncio.run(run(setting, cluster, roles, random.Random(args.seed)))))
        if not args.json:
            print(table(rows[-1]), flush=True)
    if args.json:
        print(json.dumps({"runs": rows}))
    return 0 if all(row["passed"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
