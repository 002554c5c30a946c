"""Short ways to say which sequences a test serves, and what came out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from engine.block_pool import BlockPool
from engine.budgets import Budgets
from engine.events import Event, Matched
from engine.hash_executor import HashExecutor
from engine.local import LocalEngine
from engine.plan import Plan, Result
from engine.scheduler import Scheduler
from kvrelay.requests import RequestId, Sampling, SequenceKey, SequenceSpec, SessionId, StopRule

GREEDY = Sampling(temperature=0.0)


def key(name: str) -> SequenceKey:
    return SequenceKey(SessionId("session"), RequestId(name), 1)


def spec(
    name: str,
    prompt: int | Iterable[int],
    max_tokens: int = 1,
    sampling: Sampling = GREEDY,
    stop: Iterable[int] = (),
    output: Iterable[int] = (),
) -> SequenceSpec:
    """A sequence with a prompt of so many tokens (or these), of which `output` was already streamed."""
    tokens = tuple((7 * i + len(name)) % 256 for i in range(prompt)) if isinstance(prompt, int) else tuple(prompt)
    return SequenceSpec(key(name), tokens + tuple(output), len(tokens), sampling, StopRule(max_tokens, frozenset(stop)))


def sequences_of(one: SequenceSpec) -> list[SequenceSpec]:
    """The sequences of a request, as requests of their own."""
    return [
        replace(one, key=replace(one.key, sequence=s), n=1, sampling=one.sampling.of_sequence(s)) for s in range(one.n)
    ]


def constant(plan: Plan, token_id: int = 9) -> Result:
    """What a model would answer that always says the same."""
    return Result(plan.step_id, (token_id,) * plan.num_samples)


def steps(scheduler: Scheduler, token_id: int = 9) -> Iterator[tuple[Plan, tuple[Event, ...]]]:
    """Step until nothing is left to do; AssertionError if nothing can run before that."""
    while scheduler.has_work:
        plan = scheduler.schedule()
        if plan is None:
            assert not scheduler.has_work, "nothing can run"
            return
        yield plan, scheduler.apply(plan, constant(plan, token_id))


def rows(plan: Plan) -> list[tuple[str, int, int]]:
    """(request, start, tokens) of each slice."""
    return [(s.key.request_id, s.start, len(s.token_ids)) for s in plan.slices]


def hash_engine(
    num_blocks: int,
    block_size: int = 16,
    budgets: Budgets | None = None,
    *,
    cache: bool = False,
    swap_slots: int = 0,
    fingerprint: str = "",
) -> tuple[LocalEngine, BlockPool]:
    pool = BlockPool(num_blocks, cache=cache)
    executor = HashExecutor(num_blocks, block_size, swap_blocks=swap_slots)
    scheduler = Scheduler(pool, block_size, budgets or Budgets(), fingerprint=fingerprint, swap_slots=swap_slots)
    return LocalEngine(executor, scheduler), pool


def cached_tokens(events: Iterable[Event]) -> dict[str, int]:
    """Tokens that needed no computing when a sequence was first admitted, by request."""
    found: dict[str, int] = {}
    for event in events:
        if isinstance(event, Matched):
            found.setdefault(event.key.request_id, event.num_tokens)
    return found


def alone(sequence: SequenceSpec, block_size: int = 16) -> tuple[int, ...]:
    """What the hash model says to this sequence when it has a big pool for itself."""
    engine, _ = hash_engine(1024, block_size)
    return engine.generate([sequence])[sequence.key]
