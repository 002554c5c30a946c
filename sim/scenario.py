"""What a seed means: the cluster's shape, the load, and which kinds of fault may happen how often. Values only."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from kvrelay.config import ROUTERS
from kvrelay.link import LEASE_S
from kvrelay.models.builtin import BUILTIN_EOS
from kvrelay.requests import Role, Sampling, StopRule
from sim.coordinator_node import Ask
from sim.reference import Answer
from sim.shapes import BLOCK_SIZE, WorkerShape

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
    "no_prefill",
    "coordinator",
    "leave",
    "slow_reader",
    "deadline",
)
HARMLESS = ("stall", "nap")
"""Alone in a seed, they must end and move nothing: stalls of up to a second, and pauses of a coordinator."""
GRAMMARS = tuple(
    json.dumps({"grammars": [{"lark_grammar": f"start: /{regex}/"}]})
    for regex in ("[0-9]{12}", "[a-f]{20,40}", "(ab|[0-9]){1,60}", "x?")
)


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
    router: str
    local_prefill_below: int
    alike: tuple[int, int, int, int]
    """How many prompts are new, begin with an opening that others have too, are one that was sent, go on from one."""
    short_news: bool
    """A cache's history is given up, for a list of all there is, after a few events and not only after very many."""
    samples: tuple[int, ...]
    """Numbers of sequences that a request may ask for."""


def scenario_of(seed: int) -> Scenario:
    """The same for the same seed, whatever ran before."""
    rng = random.Random(f"scenario {seed}")
    transport = rng.choice(("nixl", "nixl", "grpc"))
    coordinators = tuple(f"c{i}" for i in range(rng.choice((1, 1, 2))))
    addresses = tuple(f"{name}:1" for name in coordinators)
    tight = rng.random() < 0.2
    lease_s = rng.choice((LEASE_S, LEASE_S, 2.5))
    counts = {Role.PREFILL: rng.choice((0, 1, 1, 1, 2, 2, 2, 2, 2)), Role.DECODE: rng.choice((1, 2, 2))}
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
            prefix_cache=rng.random() < 0.8,
            preempt=rng.choice(("auto", "auto", "swap", "recompute")) if role is Role.DECODE else "auto",
            swap_slots=rng.choice((0, 4, 64)) if role is Role.DECODE else 0,
            swap_s=rng.choice((0.0005, 0.05)),
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
        num_requests=16 if tight else rng.choice((5, 10, 16)),
        arrive_within_s=0.5 if tight else rng.choice((0.5, 4.0, 8.0)),
        smallest_pool=min(w.num_blocks for w in workers),
        tight=tight,
        window=rng.choice((4, 32, 256)),
        router=rng.choice(ROUTERS),
        local_prefill_below=rng.choice((0, 0, 24, 1000)),
        alike=rng.choice(((4, 3, 1, 2), (1, 4, 2, 6))),
        short_news=rng.random() < 0.5,
        samples=rng.choice(((1,), (1, 1, 1, 2, 4), (1, 1, 1, 2, 4))),
    )


def asks_of(
    scenario: Scenario, answer: Callable[[Ask], tuple[Answer, ...]]
) -> Iterator[tuple[Ask, tuple[Answer, ...]]]:
    """The requests of a seed with their right answers; each fits every pool, and many begin alike."""
    rng = random.Random(f"asks {scenario.seed}")
    openings = [_tokens(rng, rng.choice((8, 16, 17, 32, 40, 64))) for _ in range(2)]
    limit = scenario.smallest_pool * BLOCK_SIZE
    told: list[tuple[Ask, tuple[Answer, ...]]] = []
    for i in range(scenario.num_requests):
        ask = _ask(rng, f"r{i}", scenario)
        prompt, after = ask.prompt_ids, ""
        kind = rng.choices(("new", "opening", "again", "turn"), scenario.alike)[0] if told else "opening"
        before, answers = rng.choice(told) if told else (ask, ())
        if kind == "opening":
            prompt = rng.choice(openings) + prompt
        elif kind == "again":
            prompt, after = before.prompt_ids, rng.choice(("", before.name))
        elif kind == "turn":
            after = before.name
            prompt = before.prompt_ids + rng.choice(answers).token_ids + prompt[: rng.choice((1, 5, 20))]
        if len(prompt) + 2 > (limit if not scenario.tight else min(limit, 64)):
            prompt, after = ask.prompt_ids, ""
        salt = before.cache_salt if after and rng.random() < 0.8 else ask.cache_salt
        most = min(ask.stop.max_tokens, limit - len(prompt))
        stop = StopRule(most, ask.stop.stop_token_ids, min(ask.stop.min_tokens, most))
        ask = replace(ask, prompt_ids=prompt, after=after, cache_salt=salt, stop=stop)
        told.append((ask, answer(ask)))
        yield told[-1]


def _reshaped(sampling: Sampling, rng: random.Random) -> Sampling:
    """One in four asks for what depends on the tokens before it, and for log-probabilities."""
    if rng.random() >= 0.25:
        return sampling
    return replace(
        sampling,
        repetition_penalty=rng.choice((1.0, 1.3)),
        presence_penalty=rng.choice((0.0, 0.7)),
        frequency_penalty=rng.choice((0.0, 0.4)),
        logit_bias=((rng.randrange(256), 9.0),),
        logprobs=rng.choice((0, 3)),
    )


def _ruled(ask: Ask, rng: random.Random) -> Ask:
    """Some may not end before a number of tokens, or only with what a grammar allows; some hear the stop string too."""
    stop, sampling = ask.stop, ask.sampling
    if rng.random() < 0.25:
        stop = replace(stop, min_tokens=min(stop.max_tokens, rng.choice((1, 2, 5, 16, 17, 80))))
    if rng.random() < 0.15:
        stop = replace(stop, stop_token_ids=stop.stop_token_ids | {BUILTIN_EOS})
        sampling = replace(sampling, grammar=rng.choice(GRAMMARS))
        if rng.random() < 0.5:  # of two tokens each: chance alone would hardly ever say one
            ask = replace(ask, stop_strings=tuple("".join(rng.choices("0123456789abcdef", k=2)) for _ in range(8)))
    return replace(ask, stop=stop, sampling=sampling, include_stop=rng.random() < 0.2)


def _tokens(rng: random.Random, num: int) -> tuple[int, ...]:
    return tuple(rng.randrange(256) for _ in range(num))


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
    ask = Ask(
        name=name,
        prompt_ids=_tokens(rng, length),
        sampling=_reshaped(sampling, random.Random(seed)),
        stop=StopRule(max_tokens, stop_ids),
        stop_strings=strings,
        deadline_s=rng.choice((0.3, 1.0, 5.0)) if "deadline" in scenario.faults and rng.random() < 0.3 else None,
        n=rng.choice(scenario.samples),
        cache_salt=rng.choice(("", "", "", "", "", "a", "b")),
        prefix_cache=rng.random() < 0.92,
    )
    return _ruled(ask, random.Random(f"rules {seed}"))
