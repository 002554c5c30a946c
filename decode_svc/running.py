"""The attempts whose sequences are in a decode worker's batch, and what a step did for each. Knows no tickets.

An attempt runs from landed and started on, or from its reserve on if its prompt is computed here, until the last of its
n sequences is over.
"""

from __future__ import annotations

from dataclasses import replace

from decode_svc.attempt import DecodeAttempt, DecodeParts, spec_of
from engine.events import Event, Failed, Finished, Matched, Preempted, Sampled
from engine.plan import Plan
from kvrelay.blocks import blocks_for
from kvrelay.errors import InvalidArgument
from kvrelay.requests import SequenceKey
from kvrelay.session import Reserved
from worker.attempts import whole
from worker.compute_notes import ComputeNotes
from worker.desk import Desk

DECAY = 0.95


class Running:
    def __init__(self, parts: DecodeParts, desk: Desk[DecodeAttempt]) -> None:
        self._p = parts
        self._desk = desk
        self._computing: dict[SequenceKey, ComputeNotes] = {}
        """Of attempts whose prompt is computed here and has no token yet."""
        self._seconds = self._tokens = 0.0
        """Of the last steps, older ones counting less: what a token costs, most of all in steps with many."""

    def compute(self, attempt: DecodeAttempt, now: float) -> None:
        """Local prefill: the prompt joins the batch."""
        attempt.running = True
        self._computing[attempt.key] = ComputeNotes(now)
        self._desk.counters["local_prefills"] += 1
        self._p.scheduler.add(spec_of(attempt.key, attempt.work))
        self._desk.tell(attempt.key, Reserved(attempt.work.request_id, attempt.work.attempt, None))

    def has_begun(self, attempt: DecodeAttempt) -> bool:
        """Whether a step has computed something of it, here or at prefill."""
        notes = self._computing.get(attempt.key)
        return attempt.running and (notes is None or notes.started_at is not None)

    def start(self, attempt: DecodeAttempt) -> None:
        """Those of its sequences go on that are not over; they share what is computed."""
        attempt.running = True
        block_ids, attempt.block_ids = attempt.block_ids, ()
        tokens, running = attempt.first_tokens, sorted(attempt.sequences)
        filled = block_ids[: blocks_for(attempt.num_tokens, self._p.layout.block_size)]
        for sequence in running:
            first = sequence == running[0]
            if not first:
                self._p.pool.retain(filled)
                self._desk.counters["blocks_shared"] += len(filled)
            self._p.scheduler.add(
                spec_of(attempt.key_of(sequence), attempt.work, tokens[sequence]),
                block_ids=block_ids if first else filled,
                num_computed=attempt.num_tokens,
                prefix=attempt.prefix,
                published=attempt.published,
                shared=len(running) > 1,
            )

    def drop(self, attempt: DecodeAttempt) -> None:
        self._computing.pop(attempt.key, None)
        for sequence in range(attempt.work.n):
            self._p.scheduler.abort(attempt.key_of(sequence))

    def drop_sequence(self, attempt: DecodeAttempt, sequence: int) -> None:
        """The others go on. Before it has forked there is only a number to remember."""
        if attempt.running and attempt.key not in self._computing:
            self._p.scheduler.abort(attempt.key_of(sequence))
        self._over(attempt, sequence)

    def note_step(self, plan: Plan, planned_at: float, now: float) -> None:
        """What computing costs is what computing again would cost."""
        room = self._p.scheduler.room
        self._seconds = DECAY * self._seconds + now - planned_at
        self._tokens = DECAY * self._tokens + plan.num_tokens
        room.costs = replace(room.costs, compute_s=self._seconds / self._tokens)
        if room.num_copied:
            self._desk.counters["blocks_copied"] = room.num_copied
        for rows in plan.slices if self._computing else ():
            notes = self._computing.get(rows.key)
            if notes is not None:
                notes.chunk(planned_at, now, len(rows.token_ids))

    def take(self, event: Event, now: float) -> None:
        counters = self._desk.counters
        if isinstance(event, Sampled):
            self._sampled(event, now)
        elif isinstance(event, Finished):
            self._finished(event)
        elif isinstance(event, Failed):
            self._failed(event, now)
        elif isinstance(event, Preempted):
            counters["preempted"] += 1
            counters["preempted_swap" if event.swapped else "preempted_recompute"] += 1
        elif isinstance(event, Matched):
            notes = self._computing.get(event.key)
            if notes is not None and notes.matched(event.num_tokens):
                counters["matched_tokens"] += event.num_tokens

    def _sampled(self, event: Sampled, now: float) -> None:
        """A sequence that was given up before it began here is let go as soon as there is one."""
        attempt = self._desk.attempts.get(whole(event.key))
        notes = self._computing.pop(event.key, None)
        if attempt is not None and event.key.sequence not in attempt.sequences:
            self._p.scheduler.abort(event.key)
        else:
            self._desk.token(event)
        if attempt is not None and notes is not None:
            notes.token_at = now
            self._desk.tell(attempt.key, notes.record(attempt.key))
            filled = blocks_for(attempt.num_tokens, self._p.layout.block_size)
            self._desk.counters["blocks_shared"] += filled * (attempt.work.n - 1)

    def _finished(self, event: Finished) -> None:
        attempt = self._desk.attempts.get(whole(event.key))
        if attempt is None or event.key.sequence not in attempt.sequences:
            return
        self._desk.end_sequence(event.key, event.reason.value)
        self._over(attempt, event.key.sequence)

    def _failed(self, event: Failed, now: float) -> None:
        attempt = self._desk.attempts.get(whole(event.key))
        if attempt is not None and event.key.sequence in attempt.sequences:
            self._desk.fail(event.key, InvalidArgument, event.message, now)

    def _over(self, attempt: DecodeAttempt, sequence: int) -> None:
        """With its last sequence an attempt is over."""
        attempt.sequences.discard(sequence)
        if not attempt.sequences:
            self._desk.attempts.remove(attempt.key)
