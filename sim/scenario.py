"""What a seed means: the cluster's shape, the load, and which kinds of fault may happen how often. Values only."""

from __future__ import annotations

import random
from dataclasses import dataclass

from kvrelay.link import LEASE_S
from kvrelay.models.builtin import BUILTIN_EOS
from kvrelay.requests import Role, Sampling, StopRule
from sim.coordinator_node import Ask
from sim.worker_node import BLOCK_SIZE, WorkerShape

KINDS = (
    "crash",
    "point",
    "pause",
    "jump",
    "cut",
    "clog",
    "slow",
    "slow_step",
    "vanish",
    "write",
    "flip",
    "drain",
    "coordinator",
    "leave",
    "slow_reader",
    "deadline",
)
HARMLESS = ("stall", "nap")
"""Alone in a seed, they must end and move nothing: stalls of up to a second, and pauses of a coordinator."""


@dataclass(frozen=True)
class Scenario:
    """faults: the kinds this seed may see. fault_every_s: mean time between those that come at moments of their own."""

    seed: int
    workers: tuple[WorkerShape, ...]
    coordinators: tuple[str, ...]
    transport: str
    faults: frozenset[str]
    fault_every_s: float
    fault_until_s: float
    num_requests: int
    arrive_within_s: float
    smallest_pool: int
    tight: bool
    window: int


def scenario_of(seed: int) -> Scenario:
    """The same for the same seed, whatever ran before."""
    rng = random.Random(f"scenario {seed}")
    transport = rng.choice(("nixl", "nixl", "grpc"))
    coordinators = tuple(f"c{i}" for i in range(rng.choice((1, 1, 2))))
    addresses = tuple(f"{name}:1" for name in coordinators)
    tight = rng.random() < 0.15
    lease_s = rng.choice((LEASE_S, LEASE_S, 2.5))
    counts = {Role.PREFILL: rng.choice((1, 2, 2)), Role.DECODE: rng.choice((1, 2, 2))}
    verify_kv = rng.random() < 0.3
    workers = tuple(
        WorkerShape(
            role=role,
            name=f"{role.value[0]}{i}",
            coordinators=addresses,
            transport=transport,
            num_blocks=rng.choice((7, 9)) if tight and role is Role.DECODE else rng.choice((12, 20, 32, 64)),
            step_tokens=rng.choice((16, 32, 64, 128)),
            max_sequences=rng.choice((2, 8, 64)),
            step_s=rng.choice((0.004, 0.01, 0.03)),
            verify_kv=verify_kv,
            lease_s=lease_s,
        )
        for role, count in counts.items()
        for i in range(count)
    )
    share = rng.choice((0.0, 0.2, 0.4, 0.4, 0.7))
    faults = frozenset(kind for kind in KINDS if rng.random() < share)
    if rng.random() < 0.12:
        faults = frozenset({rng.choice(HARMLESS)})
    return Scenario(
        seed=seed,
        workers=workers,
        coordinators=coordinators,
        transport=transport,
        faults=faults,
        fault_every_s=rng.choice((0.3, 1.0, 3.0)),
        fault_until_s=rng.uniform(4.0, 12.0),
        num_requests=24 if tight else rng.choice((6, 12, 24)),
        arrive_within_s=0.5 if tight else rng.choice((0.5, 4.0, 8.0)),
        smallest_pool=min(w.num_blocks for w in workers),
        tight=tight,
        window=rng.choice((4, 32, 256)),
    )


def asks_of(scenario: Scenario) -> list[Ask]:
    """The requests of a seed; each fits every pool."""
    rng = random.Random(f"asks {scenario.seed}")
    return [_ask(rng, f"r{i}", scenario) for i in range(scenario.num_requests)]


def _ask(rng: random.Random, name: str, scenario: Scenario) -> Ask:
    limit = scenario.smallest_pool * BLOCK_SIZE
    sizes = (1, 2, 15, 16, 17, 31, 32, 33, rng.randint(1, 60), rng.randint(1, limit * 2 // 3))
    length = min(rng.choice(sizes), limit - 2)
    if scenario.tight:
        length, rest = rng.randint(1, 32), rng.randint(40, 80)
    else:
        rest = rng.choice((1, 2, 3, 8, 17, 40, rng.randint(1, 80)))
    max_tokens = min(rest, limit - length)
    seed = rng.randrange(1 << 32)
    sampling = Sampling(temperature=0.0) if rng.random() < 0.4 else Sampling(temperature=1.0, seed=seed)
    stop_ids = frozenset({BUILTIN_EOS}) if rng.random() < 0.5 else frozenset()
    if rng.random() < 0.2:
        stop_ids |= {rng.randrange(256) for _ in range(rng.choice((6, 150)))}
    strings = tuple(rng.choice("abcdefghijklmnopqrstuvwxyz0123456789 ") for _ in range(8)) if rng.random() < 0.2 else ()
    return Ask(
        name=name,
        prompt_ids=tuple(rng.randrange(256) for _ in range(length)),
        sampling=sampling,
        stop=StopRule(max_tokens, stop_ids),
        stop_strings=strings,
        deadline_s=rng.choice((0.3, 1.0, 5.0)) if "deadline" in scenario.faults and rng.random() < 0.3 else None,
    )
