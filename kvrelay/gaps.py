"""Why a token came late: each gap between two tokens of a stream split into causes that add up to it. Pure.

A gap is the time from the writing of one token to the writing of the next, on the coordinator's clock. It is

1. waiting for the token to arrive: the worker's part, from the end of the step of the token before to the end of its
   own (one clock, so no offset is needed), and delivery, the rest;
2. writing it: a little of it is delivery, what is more was the reader's.

The worker's part is its own step, phase by phase, and what came between: steps in which the sequence had no token, and
time in which the worker computed nothing. Knows no trace, no worker and no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from kvrelay.steps import CostModel, Shares, StepLog, StepRecord

__all__ = [
    "CAUSES",
    "Cause",
    "CostModel",
    "StepLog",
    "StepRecord",
    "TokenPoint",
    "accumulate",
    "accumulate_stream",
    "gap_of",
    "split",
]


class Cause(StrEnum):
    """The closed list."""

    SCHEDULE_WAIT = "schedule_wait"
    BASE_COMPUTE = "base_compute"
    BATCH_GROWTH = "batch_growth"
    PREFILL_IN_STEP = "prefill_in_step"
    KV_WAIT = "kv_wait"
    SWAP_OR_PREEMPTION = "swap_or_preemption"
    SAMPLING = "sampling"
    HOST_STALL = "host_stall"
    DELIVERY = "delivery"
    SLOW_READER = "slow_reader"
    MIGRATION = "migration"
    UNEXPLAINED = "unexplained"


CAUSES = tuple(Cause)
SCHEDULE_WAIT, BASE_COMPUTE, BATCH_GROWTH, PREFILL_IN_STEP, KV_WAIT, SWAP, SAMPLING = range(7)
HOST_STALL, DELIVERY, SLOW_READER, MIGRATION, UNEXPLAINED = range(7, 12)
TOOK, END = SLOW_READER, MIGRATION
"""In what is kept of a step, whose own causes end before these: seconds it took, and its end."""
PHASE_CAUSES = (SCHEDULE_WAIT, BASE_COMPUTE, SAMPLING, DELIVERY)

STALL_S = 0.02
"""A phase of a step that takes longer than this and many times what it should was not computing."""
STALL_TIMES = 3.0
"""How many times what the model says a forward pass takes, before it was held up."""
PHASE_TIMES = 10.0
"""The same of the other phases against what they usually take."""
IDLE_S = 0.002
"""Between two steps of a busy worker there is less than this."""
WRITE_S = 0.005
"""What writing to a reader that reads may take of a write that was slow."""
SLOW_WRITE_S = 0.05
"""A write up to this long may be a busy process's own doing, and is delivery."""


class TokenPoint(NamedTuple):
    """A token of a stream. arrived_s, sent_s: when it came and when it had been written, seconds on one clock.

    step: None for a token that has none (token 0 of prefill), or whose step is not known.
    """

    arrived_s: float
    sent_s: float
    attempt: int = 0
    step: StepRecord | None = None


def gap_of(previous: TokenPoint, token: TokenPoint) -> float:
    """Seconds, never negative."""
    return max(0.0, token.sent_s - previous.sent_s)


def split(previous: TokenPoint, token: TokenPoint, steps: StepLog | None, exposed_s: float = 0.0) -> dict[Cause, float]:
    """The gap's seconds by cause, only those above zero; they add up to `gap_of`.

    steps: of the worker whose step made `token`; None if nothing is known of it. exposed_s: of the hand-off of this
    attempt, from token 0 to landed; it counts in the gap after a token 0 that prefill sampled.
    """
    seconds = [0.0] * len(CAUSES)
    accumulate(seconds, previous, token, steps, exposed_s)
    return {cause: value for cause, value in zip(CAUSES, seconds, strict=True) if value > 0.0}


def accumulate(
    out: list[float], previous: TokenPoint, token: TokenPoint, steps: StepLog | None, exposed_s: float = 0.0
) -> None:
    """As `split`, added to `out`, which is in the order of CAUSES."""
    gap = token.sent_s - previous.sent_s
    if gap <= 0.0:
        return
    begun = token.arrived_s if token.arrived_s > previous.sent_s else previous.sent_s
    writing = min(gap, max(0.0, token.sent_s - begun))
    slow = writing - WRITE_S if writing > SLOW_WRITE_S else 0.0
    out[DELIVERY] += writing - slow
    out[SLOW_READER] += slow
    waiting = gap - writing
    if waiting <= 0.0:
        return
    step, before = token.step, previous.step
    if previous.attempt != token.attempt:
        _first_step(out, waiting, step, steps, MIGRATION)
    elif before is None:
        _after_first(out, waiting, step, steps, exposed_s)
    elif step is None or steps is None:
        out[UNEXPLAINED] += waiting
    else:
        _worker_part(out, waiting, before, step, steps)


def _worker_part(out: list[float], waiting: float, before: StepRecord, step: StepRecord, steps: StepLog) -> None:
    """The worker's part, shrunk when the waiting was shorter: then the token before was on its way for longer."""
    own = steps.parts.get(step.step_id) or _parts(step, steps)
    last = steps.parts.get(before.step_id) or _parts(before, steps)
    part = own[END] - last[END]
    if part <= 0.0:
        out[UNEXPLAINED] += waiting
        return
    scale = 1.0 if part <= waiting else waiting / part
    out[DELIVERY] += waiting - part * scale
    between = part - own[TOOK]
    if between < 0.0:  # two steps do not overlap; what clocks disagree on is taken off the step
        scale *= part / (part - between)
        between = 0.0
    preempted = False
    if step.step_id - before.step_id > 1:
        preempted = _others(out, before, step, steps, between, scale)
    else:
        out[HOST_STALL if between > IDLE_S else SCHEDULE_WAIT] += between * scale
    _own_step(out, own, scale, preempted)


def _others(
    out: list[float], before: StepRecord, step: StepRecord, steps: StepLog, between: float, scale: float
) -> bool:
    """Steps in which the sequence had no token; True when something was preempted or swapped meanwhile."""
    took, missing, preempted = 0.0, False, bool(step.preemptions or step.swapped_blocks)
    for step_id in range(before.step_id + 1, step.step_id):
        other = steps.get(step_id)
        if other is None:
            missing = True
            break
        took += other.duration_s
        preempted = preempted or bool(other.preemptions or other.swapped_blocks)
    took = min(took, between)
    idle = between - took
    out[SWAP if preempted else SCHEDULE_WAIT] += took * scale
    if missing:
        out[UNEXPLAINED] += idle * scale
    else:
        few = IDLE_S * (step.step_id - before.step_id)
        out[HOST_STALL if idle > few else SCHEDULE_WAIT] += idle * scale
    return preempted


def _own_step(out: list[float], own: tuple[float, ...], scale: float, preempted: bool = False) -> None:
    out[SCHEDULE_WAIT] += own[SCHEDULE_WAIT] * scale
    out[BASE_COMPUTE] += own[BASE_COMPUTE] * scale
    out[BATCH_GROWTH] += own[BATCH_GROWTH] * scale
    out[SWAP if preempted else PREFILL_IN_STEP] += own[PREFILL_IN_STEP] * scale
    out[SAMPLING] += own[SAMPLING] * scale
    out[DELIVERY] += own[DELIVERY] * scale
    if own[HOST_STALL]:
        out[HOST_STALL] += own[HOST_STALL] * scale
    if own[SWAP]:
        out[SWAP] += own[SWAP] * scale


def _parts(step: StepRecord, steps: StepLog) -> tuple[float, ...]:
    """A step's own seconds by cause (up to DELIVERY), then how long it took and when it ended. Made once per step."""
    out, usual = [0.0] * (END + 1), steps.typical()
    for cause, seconds, usually in zip(PHASE_CAUSES, (step[2], step[3], *step[5:7]), usual, strict=True):
        stalled = seconds > STALL_S and seconds > PHASE_TIMES * usually
        out[cause] += usually if stalled else seconds
        out[HOST_STALL] += seconds - usually if stalled else 0.0
    _forward(out, step, steps.costs)
    out[TOOK], out[END] = step.duration_s, step.end_s
    parts = steps.parts[step.step_id] = tuple(out)
    return parts


def _forward(out: list[float], step: StepRecord, costs: CostModel) -> None:
    """What the model expects, stretched to what it took; what no batch explains was a stall, or blocks being moved."""
    forward, shares = step.forward_s, costs.shares(step)
    expected = shares.total_s
    if expected <= 0.0:
        shares, expected = Shares(1.0, 0.0, 0.0), 1.0
    elif forward - expected > STALL_S and forward > STALL_TIMES * expected and costs.is_ready:
        out[SWAP if step.swapped_blocks else HOST_STALL] += forward - expected
        forward = expected
    each = forward / expected
    out[BASE_COMPUTE] += shares.base_s * each
    out[BATCH_GROWTH] += shares.growth_s * each
    out[PREFILL_IN_STEP] += shares.prefill_s * each


def _first_step(out: list[float], waiting: float, step: StepRecord | None, steps: StepLog | None, rest: int) -> float:
    """The own step of a token with none before it on this worker; the remaining seconds go to `rest` (or nowhere)."""
    left = waiting
    if step is not None and steps is not None and step.duration_s > 0.0:
        own = min(waiting, step.duration_s)
        _own_step(out, steps.parts.get(step.step_id) or _parts(step, steps), own / step.duration_s)
        left = waiting - own
    if rest >= 0:
        out[rest] += left
    return left


def _after_first(
    out: list[float], waiting: float, step: StepRecord | None, steps: StepLog | None, exposed_s: float
) -> None:
    """The first token of decode: blocks that were still on their way, a step under way, its own step, delivery."""
    if step is None or steps is None:
        out[UNEXPLAINED] += waiting
        return
    left = _first_step(out, waiting, step, steps, -1)
    kv = min(left, max(0.0, exposed_s))
    out[KV_WAIT] += kv
    left -= kv
    before = steps.get(step.step_id - 1)
    if before is not None and step.start_s - before.end_s <= IDLE_S:
        under_way = min(left, max(0.0, step.start_s - before.start_s))
        out[SCHEDULE_WAIT] += under_way
        left -= under_way
    out[DELIVERY] += left


def accumulate_stream(
    out: list[float],
    arrived: Sequence[float],
    sent: Sequence[float],
    made_by: Sequence[StepRecord | None],
    steps: StepLog | None,
    exposed_s: float = 0.0,
) -> None:
    """All gaps of consecutive tokens of one attempt, added to `out` (in the order of CAUSES), for a tenth of the time.

    What was late on its way and what was early cancel out; of single gaps `accumulate` cannot know that.
    """
    owns: list[tuple[float, ...]] = []
    delivery = between_all = 0.0
    parts = steps.parts if steps is not None else {}
    before: tuple[float, ...] | None = None
    last_id, last_sent = -2, 0.0
    for i, step in enumerate(made_by[: len(sent)]):
        own = None
        if step is not None and steps is not None:
            step_id = step[0]
            own = parts.get(step_id) or _parts(step, steps)
            if before is not None and step_id == last_id + 1 and sent[i] - arrived[i] <= SLOW_WRITE_S:
                part = own[END] - before[END]
                between = part - own[TOOK]
                if 0.0 <= between <= IDLE_S and arrived[i] >= last_sent:
                    owns.append(own)
                    between_all += between
                    delivery += sent[i] - last_sent - part
                    before, last_id, last_sent = own, step_id, sent[i]
                    continue
            last_id = step_id
        if i:
            previous = TokenPoint(arrived[i - 1], sent[i - 1], 0, made_by[i - 1])
            accumulate(out, previous, TokenPoint(arrived[i], sent[i], 0, step), steps, exposed_s)
        before, last_sent = own, sent[i]
    if owns:
        sums: list[float] = [sum(seconds) for seconds in zip(*owns, strict=True)]
        sums[SCHEDULE_WAIT] += between_all
        sums[DELIVERY] += delivery
        _add(out, sums[:TOOK])


def _add(out: list[float], sums: list[float]) -> None:
    """Delivery below zero is taken off what a worker's clock says the rest took."""
    total = sum(sums)
    if sums[DELIVERY] < 0.0:
        sums[DELIVERY] = 0.0
        more = sum(sums)
        sums = [seconds * max(0.0, total) / more for seconds in sums] if more > 0.0 else sums
    for cause, seconds in enumerate(sums):
        out[cause] += seconds
