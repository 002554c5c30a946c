"""A thousand requests whose clients leave, in six phases of their life: is everything given back?

    python bench/aborts.py                             1,000 aborts on each transport
    python bench/aborts.py --requests 100 --transport nixl

Phases: tokenising (needs a model's tokenizer: a cluster of its own), waiting at the coordinator, waiting at prefill, in
prefill, in transfer, at decode (half of them waiting for blocks, half decoding). bench/abort_phases.py says how each is
reached and proved; only proved aborts count. Afterwards, in every process: blocks at their start values, no transfer
in flight, and no more descriptors, threads and shared memory than after a warm-up of 50 requests. Exit 1 otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import abort_phases as phases
from running import Running, Usage, is_quiet, running_roles, shared_memory

from kvrelay.client import AsyncClient

WARM_UP = 50
BACK_S = 5.0
"""Blocks and transfers must be back so soon after the last call."""
BASELINE_S = 15.0
"""Idle threads of gRPC's pool end by themselves, some time after the work."""
MAX_EMPTY_WAVES = 10

MODEL_PHASES: dict[str, tuple[phases.Wave, float]] = {"tokenising": (phases.tokenising, 1.0)}
HASH_PHASES: dict[str, tuple[phases.Wave, float]] = {
    "waiting at the coordinator": (phases.waiting_at_coordinator, 1.0),
    "waiting at prefill": (phases.waiting_at_prefill, 1.0),
    "in prefill": (phases.in_prefill, 1.0),
    "in transfer": (phases.in_transfer, 1.0),
    "at decode, decoding": (phases.decoding, 0.5),
}
FEW_BLOCKS_PHASES: dict[str, tuple[phases.Wave, float]] = {"at decode, waiting": (phases.waiting_at_decode, 0.5)}
NUM_PHASES = 6


@dataclass(frozen=True, slots=True)
class Row:
    """proved: aborts that were in the phase. waves: how often it was tried. quiet_s: until all blocks were back."""

    phase: str
    proved: int
    waves: int
    seconds: float
    quiet_s: float | None


async def run_cluster(
    cluster: Running, wanted: Mapping[str, tuple[phases.Wave, float]], each: int
) -> tuple[list[Row], dict[str, dict[str, Any]]]:
    """All phases on one cluster, and what each process held before and after."""
    async with AsyncClient(cluster.target) as client:
        scene = phases.Scene(cluster, client)
        await warm_up(scene)
        blocks = await blocks_of(client)
        before, shared = cluster.usage(), shared_memory()
        rows = [
            await abort_in(scene, name, wave, max(1, round(each * share))) for name, (wave, share) in wanted.items()
        ]
        after = await settled(cluster, before)
        held: dict[str, dict[str, Any]] = {
            name: {"before": asdict(before[name]), "after": asdict(after[name])} for name in before
        }
        blocks_after = await blocks_of(client)
        held["blocks"] = {"before": blocks, "after": blocks_after}
        held["shared memory"] = {
            "before": len(shared),
            "after": len(shared_memory() & shared),
            "new": sorted(shared_memory() - shared),
        }
    return rows, held


async def warm_up(scene: phases.Scene) -> None:
    """In a wave as large as those to come, and with a long text: threads that a first burst starts are no leak."""
    await scene.client.tokenize(phases.long_text())
    calls = [scene.ask(scene.prompt(8), max_tokens=2) for _ in range(WARM_UP)]
    await asyncio.gather(*(call.task for call in calls))
    failed = [call.error for call in calls if call.error is not None]
    if failed:
        raise SystemExit(f"warm-up: {failed[0]}")
    await scene.leave()


async def abort_in(scene: phases.Scene, name: str, wave: phases.Wave, wanted: int) -> Row:
    proved = waves = empty = 0
    began = time.monotonic()
    while proved < wanted and empty < MAX_EMPTY_WAVES:
        found = await wave(scene)
        proved, waves, empty = proved + found, waves + 1, 0 if found else empty + 1
        await scene.seen(is_quiet, BACK_S)
    left_at = time.monotonic()
    quiet = await scene.seen(is_quiet, BACK_S)
    row = Row(name, proved, waves, left_at - began, time.monotonic() - left_at if quiet else None)
    say(f"{name:28} {proved:5} proved in {waves} waves, {row.seconds:.0f} s")
    return row


async def blocks_of(client: AsyncClient) -> dict[str, int]:
    """Blocks that are free or cached, by worker."""
    workers = (await client.topology())["workers"]
    return {w["id"]: w["blocks"]["free"] + w["blocks"]["cached"] for w in workers}


async def settled(cluster: Running, before: Mapping[str, Usage]) -> dict[str, Usage]:
    """What each process holds, once it holds no more than before; else after BASELINE_S."""
    ends_at = time.monotonic() + BASELINE_S
    while True:
        after = cluster.usage()
        if not any(grown(before[name], after[name]) for name in before) or time.monotonic() > ends_at:
            return after
        await asyncio.sleep(0.25)


def grown(before: Usage, after: Usage) -> dict[str, int]:
    return {
        name: getattr(after, name) - getattr(before, name)
        for name in ("descriptors", "threads", "shared_maps")
        if getattr(after, name) > getattr(before, name)
    }


def broken(rows: Sequence[Row], held: Mapping[str, dict[str, Any]], each: int) -> list[str]:
    found = [f"{row.phase}: blocks or transfers not back {BACK_S:g} s after" for row in rows if row.quiet_s is None]
    found += [f"{row.phase}: only {row.proved} proved" for row in rows if row.proved < each // 2]
    if held["blocks"]["before"] != held["blocks"]["after"]:
        found.append(f"blocks: {held['blocks']}")
    if held["shared memory"]["new"]:
        found.append(f"shared memory: {held['shared memory']['new']}")
    for name in held.keys() - {"blocks", "shared memory"}:
        more = grown(Usage(**held[name]["before"]), Usage(**held[name]["after"]))
        found += [f"{name}: {count} more {what}" for what, count in more.items()]
    return found


@dataclass(frozen=True, slots=True)
class Setting:
    """A cluster for some phases: flags of its coordinator, prefill and decode."""

    name: str
    wanted: Mapping[str, tuple[phases.Wave, float]]
    coordinator: tuple[str, ...]
    prefill: tuple[str, ...]
    decode: tuple[str, ...]


def settings(transport: str, model: str) -> list[Setting]:
    hashing, wire = ("--executor", "hash"), ("--transport", transport)
    few_prefill, few_decode = ((*hashing, *wire, *flags) for flags in phases.FEW_BLOCKS)
    plain = ((*hashing, *wire, *flags) for flags in (phases.PREFILL_FLAGS, phases.DECODE_FLAGS))
    found = [
        Setting("hash", HASH_PHASES, hashing, *plain),
        Setting("few blocks", FEW_BLOCKS_PHASES, hashing, few_prefill, few_decode),
    ]
    if model:
        serving = ("--executor", "torch", "--model", model)
        worker = (*serving, *wire, "--threads", "1")
        found.append(Setting("model", MODEL_PHASES, serving, worker, worker))
    return found


def measure(transport: str, arguments: argparse.Namespace) -> dict[str, Any]:
    each = -(-arguments.requests // NUM_PHASES)
    rows: list[Row] = []
    held: dict[str, Any] = {}
    found: list[str] = []
    for setting in settings(transport, arguments.model):
        flags = {"coordinator": setting.coordinator, "prefill": setting.prefill, "decode": setting.decode}
        with tempfile.TemporaryDirectory() as directory, running_roles(flags, Path(directory)) as cluster:
            made, kept = asyncio.run(run_cluster(cluster, setting.wanted, each))
        rows += made
        held[setting.name] = kept
        found += broken(made, kept, each)
    proved = sum(row.proved for row in rows)
    return {
        "transport": transport,
        "proved": proved,
        "phases": [asdict(r) for r in rows],
        "held": held,
        "broken": found,
    }


def table(result: Mapping[str, Any]) -> str:
    lines = [
        f"{result['transport']}: {result['proved']} aborts",
        f"{'phase':28} {'proved':>6} {'waves':>6}  all blocks back",
    ]
    for row in result["phases"]:
        back = "no" if row["quiet_s"] is None else f"{row['quiet_s']:.2f} s"
        lines.append(f"{row['phase']:28} {row['proved']:6} {row['waves']:6}  {back}")
    for cluster, held in result["held"].items():
        for name, pair in held.items():
            lines.append(f"{cluster:6} {name:14} {_short(pair['before'])} -> {_short(pair['after'])}")
    return "\n".join(lines)


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_short(one)}" for name, one in value.items())
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000, help="aborts on each transport, over all phases")
    parser.add_argument("--transport", default="", choices=("nixl", "grpc"), help="one of them; default: both")
    parser.add_argument("--model", default="smollm2-135m-instruct", help='whose tokenizer; "": skip that phase')
    parser.add_argument("--json", action="store_true", help="print the figures as JSON on stdout")
    arguments = parser.parse_args(argv)
    results = []
    for transport in (arguments.transport,) if arguments.transport else ("nixl", "grpc"):
        say(f"{transport}:")
        results.append(measure(transport, arguments))
    print(json.dumps(results, indent=2) if arguments.json else "\n\n".join(map(table, results)))
    for result in results:
        for what in result["broken"]:
            say(f"BROKEN: {result['transport']}: {what}")
    return 1 if any(result["broken"] for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
