"""Tokens joined to the steps that made them, and every gap split into its causes. Knows no file and no words.

`gaps.split` is the one place that knows causes. What it gives for the worker's part depends on the two steps alone, and
the tokens of a batch share those: it is asked once for each pair of steps, and the rest is arithmetic over arrays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvrelay import gaps
from kvrelay.gaps import CAUSES, StepRecord, TokenPoint
from kvrelay.steps import StepLog
from kvrelay.tbt.otlp import Floats, Ints
from kvrelay.tbt.reader import Recording, Steps, WorkerLife
from kvrelay.telemetry import names

AHEAD = 256
"""Steps beyond the one that is judged that the cost model has seen: the first would have nothing to compare with."""
ZERO, UNEXPLAINED = 0, 1
"""The first two mixes: nothing, and one second of unexplained."""
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Tokens:
    """One row a token, those of a stream one after the other. Arrays of one shape (n,).

    request: row in Recording.requests. life: row in Joined.lives, -1 without a worker. row: of its step in that life,
    -1 if none is known. exposed_s: of the hand-off of its attempt.
    """

    request: Ints
    sequence: Ints
    attempt: Ints
    index: Ints
    life: Ints
    step_id: Ints
    row: Ints
    arrived_s: Floats
    sent_s: Floats
    exposed_s: Floats

    def __len__(self) -> int:
        return len(self.request)


@dataclass(frozen=True, slots=True)
class Gaps:
    """One row a gap; token: row in Tokens of the later one, the earlier one is the row before.

    Seconds by cause are mixes[mix] * scale, and delivery_s and slow_s besides. Arrays (n,), mixes (m, causes).
    """

    token: Ints
    gap_s: Floats
    mix: Ints
    scale: Floats
    delivery_s: Floats
    slow_s: Floats
    mixes: Floats

    def __len__(self) -> int:
        return len(self.token)

    def causes(self, rows: Ints) -> Floats:
        """Seconds by cause of some gaps: (len(rows), causes), in the order of gaps.CAUSES."""
        seconds: Floats = self.mixes[self.mix[rows]] * self.scale[rows, None]
        seconds[:, gaps.DELIVERY] += self.delivery_s[rows]
        seconds[:, gaps.SLOW_READER] += self.slow_s[rows]
        return seconds

    def total(self, rows: Ints | Bools) -> Floats:
        """Seconds by cause of some gaps together: (causes,)."""
        weights = np.bincount(self.mix[rows], weights=self.scale[rows], minlength=len(self.mixes))
        seconds: Floats = weights @ self.mixes
        seconds[gaps.DELIVERY] += self.delivery_s[rows].sum()
        seconds[gaps.SLOW_READER] += self.slow_s[rows].sum()
        return seconds


@dataclass(frozen=True, slots=True)
class Joined:
    """num_holes: pairs of tokens with some missing between them; no gap is made of those."""

    recording: Recording
    lives: tuple[WorkerLife, ...]
    records: tuple[list[StepRecord], ...]
    tokens: Tokens
    gaps: Gaps
    num_holes: int

    def worker(self, token: int) -> str:
        life = int(self.tokens.life[token])
        return self.lives[life][0] if life >= 0 else ""

    def step(self, token: int) -> StepRecord | None:
        life, row = int(self.tokens.life[token]), int(self.tokens.row[token])
        return self.records[life][row] if row >= 0 else None


def join(recording: Recording) -> Joined:
    """Memory: about 100 bytes a token."""
    lives = _lives(recording)
    records = tuple(_records(recording.steps[life]) if life in recording.steps else [] for life in lives)
    tokens = _tokens(recording, lives)
    same = _same_stream(tokens)
    follows = same & (np.diff(tokens.index) == 1)
    made = _split(tokens, np.flatnonzero(follows) + 1, records)
    return Joined(recording, lives, records, tokens, made, int(same.sum() - follows.sum()))


def _lives(recording: Recording) -> tuple[WorkerLife, ...]:
    lives = dict.fromkeys(recording.steps)
    for request in recording.requests:
        lives.update(dict.fromkeys((part.worker, part.incarnation) for part in request.segments if part.worker))
    return tuple(sorted(lives))


def _records(steps: Steps) -> list[StepRecord]:
    columns = [
        values.tolist() if name.endswith("_s") else values.astype(np.int64).tolist()
        for name, values in steps.columns.items()
    ]
    return [StepRecord(*fields) for fields in zip(steps.ids.tolist(), *columns, strict=True)]


def _tokens(recording: Recording, lives: Sequence[WorkerLife]) -> Tokens:
    places = {life: place for place, life in enumerate(lives)}
    counts, heads, exposed = [], [], []
    arrived, sent, step_ids = [np.empty(0)], [np.empty(0)], [np.empty(0, dtype=np.int64)]
    for number, request in enumerate(recording.requests):
        pushes = [piece for piece in request.pieces if piece.name == names.SPAN_PUSH]
        pushed = {(piece.attempt, piece.sequence): piece.exposed_s for piece in pushes}
        for part in request.segments:
            counts.append(len(part.offsets_s))
            life = places.get((part.worker, part.incarnation), -1)
            heads.append((number, part.sequence, part.attempt, part.first_index, life))
            common = pushed.get((part.attempt, None), 0.0)  # one push for all sequences of a prompt
            exposed.append(pushed.get((part.attempt, part.sequence), common))
            arrived.append(part.offsets_s)
            sent.append(part.sent_s)
            step_ids.append(part.step_ids)
    columns = np.repeat(np.array(heads, dtype=np.int64).reshape(-1, 5), counts, axis=0)
    request, sequence, attempt, first, life = columns.T
    total = len(columns)
    starts = np.repeat(np.cumsum([0, *counts])[:-1], counts) if counts else np.empty(0, dtype=np.int64)
    ids = np.concatenate(step_ids)
    return Tokens(
        request=request,
        sequence=sequence,
        attempt=attempt,
        index=first + np.arange(total) - starts,
        life=life,
        step_id=ids,
        row=_rows(recording, lives, life, ids),
        arrived_s=np.concatenate(arrived),
        sent_s=np.concatenate(sent),
        exposed_s=np.repeat(np.array(exposed), counts) if counts else np.empty(0),
    )


def _rows(recording: Recording, lives: Sequence[WorkerLife], life: Ints, step_ids: Ints) -> Ints:
    rows = np.full(len(step_ids), -1, dtype=np.int64)
    for place, key in enumerate(lives):
        if key in recording.steps:
            mine = life == place
            rows[mine] = recording.steps[key].rows(step_ids[mine])
    rows[step_ids == 0] = -1
    return rows


def _same_stream(tokens: Tokens) -> Bools:
    """(n - 1,): whether a token and the one before it are of one stream."""
    same: Bools = (np.diff(tokens.request) == 0) & (np.diff(tokens.sequence) == 0)
    return same


def _split(tokens: Tokens, later: Ints, records: Sequence[list[StepRecord]]) -> Gaps:
    """The vectorised `gaps.accumulate`: what it says of writing and shrinking is said here again, and tested as one."""
    earlier = later - 1
    sent, before = tokens.sent_s[later], tokens.sent_s[earlier]
    gap = np.maximum(0.0, sent - before)
    writing = np.minimum(gap, np.maximum(0.0, sent - np.maximum(tokens.arrived_s[later], before)))
    waiting = gap - writing
    slow = np.where(writing > gaps.SLOW_WRITE_S, writing - gaps.WRITE_S, 0.0)
    delivery = writing - slow
    moved = tokens.attempt[earlier] != tokens.attempt[later]
    first = tokens.step_id[earlier] == 0
    paired = ~moved & (tokens.row[earlier] >= 0) & (tokens.row[later] >= 0)
    single = (moved | (first & (tokens.row[later] >= 0))) & ~paired & (gap > 0.0)
    mix = np.where(single | paired, ZERO, UNEXPLAINED)
    scale = np.where(mix == UNEXPLAINED, waiting, 1.0)
    out = Gaps(later, gap, mix, scale, delivery, slow, np.zeros((0, len(CAUSES))))
    mixes = np.zeros((2, len(CAUSES)))
    mixes[UNEXPLAINED, gaps.UNEXPLAINED] = 1.0
    parts = [mixes]
    count = len(mixes)
    for place, known in enumerate(records):
        here = tokens.life[later] == place
        part = _Life(tokens, out, known, count).mixes(
            np.flatnonzero(here & paired & (waiting > 0.0)), np.flatnonzero(here & single), waiting
        )
        parts.append(part)
        count += len(part)
    nowhere = np.flatnonzero((tokens.life[later] < 0) & single)
    parts.append(_Life(tokens, out, [], count).mixes(nowhere[:0], nowhere, waiting))
    return Gaps(later, gap, mix, scale, delivery, slow, np.concatenate(parts))


class _Life:
    """Mixes of the gaps that end in steps of one life of a worker, in the order of those steps: the cost model learns
    from them as they come, as it does in the coordinator."""

    def __init__(self, tokens: Tokens, out: Gaps, records: list[StepRecord], first_mix: int) -> None:
        self._tokens = tokens
        self._out = out
        self._records = records
        self._log = StepLog(limit=len(records) + 1)
        self._added = 0
        self._first_mix = first_mix

    def mixes(self, paired: Ints, single: Ints, waiting: Floats) -> Floats:
        """(pairs + single gaps, causes). Fills in mix, scale and delivery of these gaps."""
        found: list[list[float]] = []
        for row, task in self._in_order(paired, single, waiting):
            self._learn(row)
            found.append(self._pair(*task) if isinstance(task, tuple) else self._single(task))
        return np.array(found).reshape(-1, len(CAUSES))

    def _in_order(self, paired: Ints, single: Ints, waiting: Floats) -> Iterator[tuple[int, tuple[int, int] | int]]:
        """(row of the step, what is to be split), and what it is gets its place among the mixes."""
        tokens, out = self._tokens, self._out
        later = out.token[paired]
        before, row = tokens.row[later - 1], tokens.row[later]
        pairs, which = np.unique(row * (len(self._records) + 1) + before, return_inverse=True)
        tasks: list[tuple[int, int, tuple[int, int] | int]] = []
        for number, pair in enumerate(pairs.tolist()):
            at, prior = divmod(pair, len(self._records) + 1)
            tasks.append((at, number, (prior, at)))
        for number, gap in enumerate(single.tolist()):
            tasks.append((int(tokens.row[out.token[gap]]), len(pairs) + number, gap))
        tasks.sort(key=lambda task: task[0])
        places = np.empty(len(tasks), dtype=np.int64)
        places[[number for _, number, _ in tasks]] = np.arange(len(tasks)) + self._first_mix
        self._place_pairs(paired, before, row, places[which], waiting[paired])
        out.mix[single] = places[len(pairs) :]
        out.scale[single], out.delivery_s[single], out.slow_s[single] = 1.0, 0.0, 0.0
        return ((row_of, task) for row_of, _, task in tasks)

    def _place_pairs(self, paired: Ints, before: Ints, row: Ints, mix: Ints, waiting: Floats) -> None:
        """The worker's part may be longer than the waiting (it is shrunk), or shorter: the rest is delivery."""
        out, ends = self._out, np.array([record.end_s for record in self._records])
        part = ends[row] - ends[before] if len(paired) else np.empty(0)
        sound = part > 0.0
        scale = np.ones(len(paired))
        np.divide(waiting, part, out=scale, where=sound & (part > waiting))
        out.delivery_s[paired] += np.where(sound, waiting - part * scale, 0.0)
        out.mix[paired] = np.where(sound, mix, UNEXPLAINED)
        out.scale[paired] = np.where(sound, scale, waiting)

    def _learn(self, row: int) -> None:
        until = min(len(self._records), max(row, 0) + AHEAD)
        while self._added < until:
            self._log.add(self._records[self._added])
            self._added += 1

    def _pair(self, before: int, row: int) -> list[float]:
        """The worker's part between two steps, of just its own length."""
        prior, step = self._records[before], self._records[row]
        seconds = [0.0] * len(CAUSES)
        part = step.end_s - prior.end_s
        gaps.accumulate(seconds, TokenPoint(0.0, 0.0, 0, prior), TokenPoint(part, part, 0, step), self._log)
        return seconds

    def _single(self, gap: int) -> list[float]:
        token = int(self._out.token[gap])
        seconds = [0.0] * len(CAUSES)
        log = self._log if self._records else None
        exposed = float(self._tokens.exposed_s[token])
        gaps.accumulate(seconds, self._point(token - 1, known=False), self._point(token), log, exposed)
        return seconds

    def _point(self, token: int, known: bool = True) -> TokenPoint:
        """known: whether its step is one of this life."""
        tokens = self._tokens
        row = int(tokens.row[token]) if known else -1
        return TokenPoint(
            float(tokens.arrived_s[token]),
            float(tokens.sent_s[token]),
            int(tokens.attempt[token]),
            self._records[row] if row >= 0 else None,
        )
