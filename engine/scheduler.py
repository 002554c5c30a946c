"""Keeps sequences from add to end, step by step: engine.planner fills a step. Knows no tensors, clocks or services.

There is no prefill phase and no decode phase: each sequence has *known* tokens and *computed* tokens (KV exists), and
a step computes some of the difference. A sequence whose prompt was computed elsewhere merely starts with more of them.

The life of a sequence here:
1. add: those that own blocks for all known tokens (handed over) are `ready`, the others `waiting`. Who came first goes
   first, but those of higher classes go before until CLASS_TURNS (engine.sequence) have come after it.
2. admit: ready ones when a row is free; waiting ones when their whole known length + 1 fits into free blocks that are
   promised to nobody. Cached blocks of their prefix are held at once (engine.prefixes); the missing ones are promised,
   and taken as tokens are computed.
3. schedule: decodes first, by rank: of the highest class, the oldest first; then chunks of admitted prompts; then new
   prompts while budget is left, but those of a higher class before the chunks of lower ones.
4. apply: what was planned is computed, full blocks are published; a slice that reached the last known token samples
   one more, and with n > 1 one for each sequence that goes on from here: they share all blocks, the last partial one
   until somebody writes to it (engine.room).
5. out of blocks: sequences of lower rank not in this plan give theirs up (preempted), the lowest first and just enough
   of them, and go to the front of their class in the queue, swapped out or with nothing computed. If that would not
   suffice nobody is preempted and the sequence waits. So the oldest of the highest class always moves on.
6. end: a stop rule fires, a token cannot be drawn, or abort is called; the blocks are released. If a plan in flight
   uses them, that waits for apply; if the sequence ended with its prompt, for the next schedule, so that a push can
   retain them first.
"""

from __future__ import annotations

from dataclasses import replace

from engine.admission import Admission
from engine.block_pool import BlockPool
from engine.budgets import Budgets
from engine.events import Computed, Event, Failed, Finished, Sampled
from engine.plan import Plan, Result, SequenceSlice
from engine.planner import Planner
from engine.prefix_cache import Entry
from engine.prefixes import Prefix, Prefixes
from engine.queues import Queues
from engine.room import Room
from engine.sequence import SequenceState
from engine.swap_space import SwapSpace
from kvrelay.blocks import blocks_for
from kvrelay.requests import SequenceKey, SequenceSpec


class Scheduler:
    """One per engine. It owns the blocks of its sequences; all calls come from the engine thread.

    fingerprint: of the model, for the keys of cached blocks. swap_slots: blocks that fit the executor's host memory.
    """

    def __init__(
        self, pool: BlockPool, block_size: int, budgets: Budgets, *, fingerprint: str = "", swap_slots: int = 0
    ) -> None:
        self._pool = pool
        self._block_size = block_size
        self._budgets = budgets
        self._sequences: dict[SequenceKey, SequenceState] = {}
        self._queues = Queues()
        self.prefixes = Prefixes(pool, block_size, fingerprint)
        self.room = Room(pool, block_size, self._queues, self.prefixes, SwapSpace(swap_slots))
        self._admission = Admission(pool, block_size, self._queues, self.prefixes, self.room)
        self._planner = Planner(pool, block_size, budgets, self._queues, self._admission, self.room)
        self._queued_tokens = 0
        self._num_arrivals = 0
        self._num_steps = 0
        self._plan: Plan | None = None
        self._planned: list[SequenceState] = []  # of the plan in flight, slice by slice
        self._ended: list[SequenceState] = []  # released by the next schedule

    @property
    def num_running(self) -> int:
        return len(self._queues.running)

    @property
    def num_waiting(self) -> int:
        return len(self._queues.ready) + len(self._queues.waiting)

    @property
    def queued_tokens(self) -> int:
        """Known tokens, of all sequences, whose KV has yet to be computed."""
        return self._queued_tokens

    @property
    def has_work(self) -> bool:
        """Whether schedule should be called (again), if only to release the blocks of what has ended."""
        return bool(self._sequences or self._ended)

    @property
    def spare_blocks(self) -> int:
        """Free blocks that may go to others (tickets) without taking what sequences here are about to need:
        promised blocks, one for each running sequence, and those the first waiting prompt is waiting for, unless that
        has to leave blocks to others itself (room.kept)."""
        first = self._queues.waiting[0] if self._queues.waiting else None
        head = self._admission.missing(first) if first is not None and (first.preemptions or not self.room.kept) else 0
        return max(0, self._pool.num_free - self._queues.promised - len(self._queues.running) - head)

    def fits_alone(self, spec: SequenceSpec) -> bool:
        """Whether the whole pool could hold it to its last token. Callers refuse what does not fit before adding it."""
        slots = spec.num_prompt_tokens + spec.stop.max_tokens - 1
        return blocks_for(slots, self._block_size) <= self._pool.num_blocks

    def add(
        self,
        spec: SequenceSpec,
        *,
        block_ids: tuple[int, ...] = (),
        num_computed: int = 0,
        prefix: Prefix | None = None,
        published: Entry | None = None,
        shared: bool = False,
    ) -> None:
        """Queue a sequence whose first num_computed tokens have their KV in block_ids.

        The scheduler takes over the caller's reference to each block and releases it when the sequence ends.
        prefix: of its first tokens, if the caller has it already. published: entry of the last full one of these
        blocks, if all have their keys. shared: others refer to its last block too.
        """
        assert spec.key not in self._sequences, f"{spec.key} is already here"
        assert 0 <= num_computed < len(spec.token_ids), f"{num_computed} of {len(spec.token_ids)} tokens computed"
        assert spec.first_index < spec.stop.max_tokens, f"{spec.key} has nothing left to sample"
        assert self.fits_alone(spec), f"{spec.key} can never fit a pool of {self._pool.num_blocks} blocks"
        slots = len(block_ids) * self._block_size
        assert num_computed <= slots, f"{num_computed} computed tokens in {len(block_ids)} blocks"
        seq = SequenceState(spec, self._num_arrivals, block_ids, num_computed, slots)
        prefix = prefix or self.prefixes.of(spec)
        if prefix is not None:
            seq.chain, seq.keys = prefix.chain.copy(), list(prefix.keys)
            if published is not None and published.block_id is not None:
                seq.parent, seq.num_published = published, num_computed // self._block_size
            self.prefixes.publish(seq)
        seq.shared_tail = shared
        self._enter(seq)

    def _enter(self, seq: SequenceState) -> None:
        """Those of which one token is left to compute lack at most one block, which they take as they go on."""
        self._num_arrivals += 1
        self._sequences[seq.spec.key] = seq
        self._queued_tokens += seq.num_uncomputed
        is_ready = seq.num_computed > 0 and (seq.num_uncomputed == 1 or seq.slots >= len(seq.known))
        self._queues.enter(seq, is_ready)

    def abort(self, key: SequenceKey) -> bool:
        """Forget a sequence and release its blocks, at apply if a plan in flight uses them. False if it is not here."""
        seq = self._sequences.get(key)
        if seq is None:
            return False
        self._forget(seq)
        if seq.planned:
            seq.aborted = True
        else:
            self.room.release(seq)
        return True

    def schedule(self, max_prompt_tokens: int | None = None) -> Plan | None:
        """The next step, or None when nothing can run now. Its apply must come before the next schedule.

        max_prompt_tokens: a bound on the rows of prompts in this step, beside the budgets (None: no other).
        """
        assert self._plan is None, f"step {self._num_steps} was not applied"
        while self._ended:
            self.room.release(self._ended.pop())
        self._queues.fill_rows(self._budgets.max_sequences)
        slices, self._planned = self._planner.fill(max_prompt_tokens)
        room = self.room
        self._queued_tokens += room.take_lost() - self._admission.take_found()
        if not slices:
            return None
        self._num_steps += 1
        moves = tuple(room.copies), tuple(room.swap_out), tuple(room.swap_in)
        self._plan = Plan(self._num_steps, tuple(slices), *moves)
        return self._plan

    def apply(self, plan: Plan, result: Result) -> tuple[Event, ...]:
        """Take in what the plan in flight computed. Rows of sequences aborted since then are dropped.

        Blocks named by a Computed event stay HELD at least until the next schedule, also if the sequence ended.
        """
        assert plan is self._plan, f"step {plan.step_id} is not in flight"
        assert result.step_id == plan.step_id, f"result of step {result.step_id} for step {plan.step_id}"
        assert len(result.token_ids) == plan.num_samples, f"{len(result.token_ids)} tokens, want {plan.num_samples}"
        self.room.settle()
        of_schedule: list[Event] = [*self.room.take_events(), *self._admission.take_events()]
        events = [event for event in of_schedule if event.key in self._sequences]
        planned, self._planned, self._plan = self._planned, [], None
        at = next_at = 0  # where the slice's draws stand in the result
        for rows, seq in zip(plan.slices, planned, strict=True):
            at, next_at = next_at, next_at + (1 + len(rows.forks) if rows.samples else 0)
            seq.planned = False
            if seq.aborted:
                self.room.release(seq)
                continue
            if rows.start < seq.prompt_end:
                events.append(Computed(rows.key, rows.context_len, rows.table))
            seq.num_computed += len(rows.token_ids)
            self._queued_tokens -= len(rows.token_ids)
            if seq.num_computed >= (seq.num_published + 1) * self._block_size:
                self.prefixes.publish(seq)
            if rows.samples:
                self._take_token(seq, rows, result, at, events)
        return tuple(events)

    def _take_token(
        self, seq: SequenceState, rows: SequenceSlice, result: Result, at: int, events: list[Event]
    ) -> None:
        """What was drawn at `at` of the result for a sequence that ends with it, or goes on, and its forks after it."""
        failed = result.failure(at) if result.failures else None
        token_id = result.token_ids[at]
        if failed is None:
            logprobs = result.logprobs[at] if result.logprobs else None
            events.append(Sampled(rows.key, rows.index, token_id, logprobs))
        if rows.forks:
            self._fork(seq, rows, result, at, events)
        if failed is not None:
            self._end(seq, rows)
            events.append(Failed(rows.key, failed))
            return
        seq.known.append(token_id)
        self._queued_tokens += 1
        reason = seq.spec.stop.finish_of(rows.index, token_id)
        if reason is not None:
            self._end(seq, rows)
            events.append(Finished(rows.key, reason, rows.index + 1))

    def _fork(self, seq: SequenceState, rows: SequenceSlice, result: Result, at: int, events: list[Event]) -> None:
        """Sequences 1, 2, ... of the request go on from here, sharing every block, each with a token of its own."""
        spec = seq.spec
        seq.spec = replace(spec, n=1)
        for number, sampling in enumerate(rows.forks, 1):
            key = replace(spec.key, sequence=number)
            failed, token_id = result.failure(at + number), result.token_ids[at + number]
            if failed is not None:
                events.append(Failed(key, failed))
                continue
            events.append(Sampled(key, rows.index, token_id, result.logprobs[at + number] if result.logprobs else None))
            reason = spec.stop.finish_of(rows.index, token_id)
            if reason is not None:
                events.append(Finished(key, reason, rows.index + 1))
                continue
            held = seq.block_ids[: blocks_for(seq.num_computed, self._block_size)]
            self._pool.retain(held)
            own = replace(spec, key=key, n=1, sampling=sampling)
            self._enter(seq.fork(own, self._num_arrivals, held, len(held) * self._block_size, token_id))

    def _end(self, seq: SequenceState, rows: SequenceSlice) -> None:
        """With these rows, which are computed: a push of a prompt's blocks must find them until the next schedule."""
        self._forget(seq)
        if rows.start < seq.prompt_end:
            self._ended.append(seq)
        else:
            self.room.release(seq)

    def _forget(self, seq: SequenceState) -> None:
        del self._sequences[seq.spec.key]
        self._queued_tokens -= seq.num_uncomputed
        self._queues.remove(seq)
