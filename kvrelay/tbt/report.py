"""What a recording says of late tokens: percentiles, causes, and the worst gaps. Pure; knows no file and no screen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvrelay.gaps import CAUSES, StepRecord
from kvrelay.tbt.join import Joined
from kvrelay.tbt.otlp import Floats, Ints
from kvrelay.telemetry import names

PERCENTILES = (50.0, 90.0, 99.0, 99.9)
SLOWEST = 0.01
"""Share of the gaps that are the slowest ones."""


@dataclass(frozen=True, slots=True)
class Worst:
    """A gap, and the step that ended it. token: row in Joined.tokens. streams: gaps that this same step ended."""

    gap: int
    token: int
    streams: int


def report(joined: Joined, top: int = 10) -> dict[str, Any]:
    """What `--json` prints. Times are milliseconds where a key says so."""
    recording, tokens, gaps = joined.recording, joined.tokens, joined.gaps
    every = np.arange(len(gaps))
    seconds = gaps.total(every)
    slow = slowest(gaps.gap_s)
    return {
        "files": recording.num_files,
        "spans": recording.num_spans,
        "requests": len(recording.requests),
        "tokens": len(tokens),
        "gaps": len(gaps),
        "steps": sum(len(steps.ids) for steps in recording.steps.values()),
        "left_out": _left_out(joined),
        "problems": recording.problems.told,
        "overall": _latencies(joined, every, _firsts(joined)),
        "workers": _workers(joined),
        "causes": {"seconds": _by_cause(seconds), "shares": _shares(seconds), "ms_per_gap": _each(seconds, len(gaps))},
        "slowest": {
            "gaps": len(slow),
            "from_ms": _ms(gaps.gap_s[slow].min()) if len(slow) else None,
            "shares": _shares(gaps.total(slow)),
        },
        "worst": [_describe(joined, worst) for worst in worst_gaps(joined, top)],
    }


def slowest(gap_s: Floats) -> Ints:
    """Rows of the slowest hundredth, at least one where there is any."""
    count = max(1, round(len(gap_s) * SLOWEST)) if len(gap_s) else 0
    rows: Ints = np.argsort(-gap_s, kind="stable")[:count]
    return rows


def worst_gaps(joined: Joined, top: int) -> list[Worst]:
    """The longest gaps, of those that one step ended only the longest."""
    tokens, gaps = joined.tokens, joined.gaps
    found: dict[tuple[int, int], Worst] = {}
    width = int(tokens.row.max(initial=0)) + 2
    step_of = tokens.life[gaps.token] * width + tokens.row[gaps.token]
    known = tokens.row[gaps.token] >= 0
    for gap in np.argsort(-gaps.gap_s, kind="stable").tolist():
        if len(found) >= top:
            break
        token = int(gaps.token[gap])
        key = (int(step_of[gap]), 0) if known[gap] else (-1, token)
        if key not in found:
            streams = int(np.count_nonzero(known & (step_of == step_of[gap]))) if known[gap] else 1
            found[key] = Worst(gap, token, streams)
    return list(found.values())


def percentiles(values_s: Floats) -> dict[str, float] | None:
    """{"p50", "p90", "p99", "p99.9", "max"} in ms, linear between ranks; None without values."""
    if not len(values_s):
        return None
    found = np.percentile(values_s, PERCENTILES)
    named = {f"p{percent:g}": _ms(value) for percent, value in zip(PERCENTILES, found, strict=True)}
    return {**named, "max": _ms(values_s.max())}


def _left_out(joined: Joined) -> dict[str, int]:
    recording = joined.recording
    return {
        "unreadable": recording.problems.num_skipped,
        "torn_lines": recording.problems.num_torn,
        "other_spans": recording.num_other,
        "requests_without_own_span": recording.num_rootless,
        "gaps_with_missing_tokens": joined.num_holes,
        "tokens_without_step": int(np.count_nonzero((joined.tokens.row < 0) & (joined.tokens.step_id != 0))),
    }


def _latencies(joined: Joined, rows: Ints, firsts: Ints) -> dict[str, Any]:
    return {
        "ttft_ms": percentiles(joined.tokens.sent_s[firsts]),
        "tbt_ms": percentiles(joined.gaps.gap_s[rows]),
        "stream_tbt_ms": percentiles(_means(joined, rows)),
        "gaps": len(rows),
        "streams": len(firsts),
    }


def _firsts(joined: Joined) -> Ints:
    """Rows of the tokens that are the first of their streams."""
    return np.flatnonzero(joined.tokens.index == 0)


def _means(joined: Joined, rows: Ints) -> Floats:
    """The mean gap of each stream."""
    if not len(rows):
        return np.empty(0)
    token = joined.gaps.token[rows]
    stream = joined.tokens.request[token] * (int(joined.tokens.sequence.max()) + 1) + joined.tokens.sequence[token]
    _, which, count = np.unique(stream, return_inverse=True, return_counts=True)
    means: Floats = np.bincount(which, weights=joined.gaps.gap_s[rows]) / count
    return means


def _workers(joined: Joined) -> list[dict[str, Any]]:
    """By worker id, all its lives together. TTFT is that of the requests whose first token this worker sampled."""
    gap_worker, first_worker = _worker_of_gaps(joined), _worker_of_firsts(joined)
    firsts = _firsts(joined)
    roles = {steps.worker: steps.role for steps in joined.recording.steps.values()}
    rows = []
    for worker in sorted({*roles, *(life[0] for life in joined.lives), *first_worker.tolist()} - {""}):
        mine = np.flatnonzero(gap_worker == worker)
        rows.append(
            {
                "worker": worker,
                "role": roles.get(worker, ""),
                **_latencies(joined, mine, firsts[first_worker == worker]),
                "steps": sum(len(s.ids) for s in joined.recording.steps.values() if s.worker == worker),
                "causes": _shares(joined.gaps.total(mine)),
            }
        )
    return rows


def _worker_of_gaps(joined: Joined) -> np.ndarray[Any, Any]:
    ids = np.array([*(life[0] for life in joined.lives), ""], dtype=object)
    found: np.ndarray[Any, Any] = ids[joined.tokens.life[joined.gaps.token]]
    return found


def _worker_of_firsts(joined: Joined) -> np.ndarray[Any, Any]:
    """Who sampled each first token: the step's worker, or else the one that has the prefill span."""
    tokens, found = joined.tokens, []
    for token in _firsts(joined).tolist():
        request = joined.recording.requests[int(tokens.request[token])]
        prefill = [piece for piece in request.pieces if piece.name == names.SPAN_PREFILL and piece.worker]
        mine = [piece for piece in prefill if piece.attempt == tokens.attempt[token]] or prefill
        found.append(joined.worker(token) if tokens.step_id[token] or not mine else mine[0].worker)
    return np.array(found, dtype=object)


def _describe(joined: Joined, worst: Worst) -> dict[str, Any]:
    tokens, token = joined.tokens, worst.token
    request = joined.recording.requests[int(tokens.request[token])]
    seconds = joined.gaps.causes(np.array([worst.gap]))[0]
    return {
        "request_id": request.request_id,
        "trace_id": request.trace_id,
        "sequence": int(tokens.sequence[token]),
        "token": int(tokens.index[token]),
        "at_s": round(float(tokens.sent_s[token]), 6),
        "gap_ms": _ms(joined.gaps.gap_s[worst.gap]),
        "worker": joined.worker(token),
        "streams": worst.streams,
        "causes_ms": {cause: _ms(value) for cause, value in ranked(seconds)},
        "step_id": int(tokens.step_id[token]),  # 0: prefill sampled it
        "step": _step(joined, token),
    }


def _step(joined: Joined, token: int) -> dict[str, Any] | None:
    """The step that made the token, and what the steps since the one before gave up."""
    step = joined.step(token)
    if step is None:
        return None
    between = _between(joined, token, step)
    return {
        "id": step.step_id,
        "ms": _ms(step.duration_s),
        "forward_ms": _ms(step.forward_s),
        "batch": step.batch,
        "prefill_tokens": step.prefill_tokens,
        "blocks_used": step.blocks_used,
        "transfers": step.transfers,
        "preemptions": step.preemptions,
        "swapped_blocks": step.swapped_blocks,
        "steps_without_it": len(between),
        "preemptions_meanwhile": sum(other.preemptions for other in between),
        "swapped_blocks_meanwhile": sum(other.swapped_blocks for other in between),
    }


def _between(joined: Joined, token: int, step: StepRecord) -> list[StepRecord]:
    """Steps after that of the token before, in which the stream had no token."""
    life, before = int(joined.tokens.life[token]), joined.step(token - 1)
    if before is None or joined.tokens.life[token - 1] != life or before.step_id >= step.step_id:
        return []
    return joined.records[life][int(joined.tokens.row[token - 1]) + 1 : int(joined.tokens.row[token])]


def ranked(seconds: Floats) -> list[tuple[str, float]]:
    """Causes with their seconds, the biggest first, without those that are nothing."""
    named = [(cause.value, float(value)) for cause, value in zip(CAUSES, seconds, strict=True) if value > 0.0]
    return sorted(named, key=lambda item: -item[1])


def _by_cause(seconds: Floats) -> dict[str, float]:
    return {cause.value: round(float(value), 6) for cause, value in zip(CAUSES, seconds, strict=True)}


def _shares(seconds: Floats) -> dict[str, float]:
    """Of the sum; all zero without any time."""
    total = float(seconds.sum())
    return {
        cause.value: round(float(value) / total, 5) if total > 0 else 0.0
        for cause, value in zip(CAUSES, seconds, strict=True)
    }


def _each(seconds: Floats, count: int) -> dict[str, float]:
    named = zip(CAUSES, seconds, strict=True)
    return {cause.value: _ms(value / count) if count else 0.0 for cause, value in named}


def _ms(seconds: float) -> float:
    return round(float(seconds) * 1000.0, 4)
