"""Decides what each step computes: budgets, chunks, admission, forks. Knows no tensors, clocks or services.

There is no prefill phase and no decode phase: each sequence has *known* tokens and *computed* tokens (KV exists), and
a step computes some of the difference. A sequence whose prompt was computed elsewhere merely starts with more of them.

The life of a sequence here:
1. add: those that own blocks for all known tokens (handed over) are `ready`, the others `waiting` in FIFO order.
2. admit: ready ones when a row is free; waiting ones when their whole known length + 1 fits into free blocks that are
   promised to nobody. Cached blocks of their prefix are held at once (engine.prefixes); the missing ones are promised,
   and taken as tokens are computed.
3. schedule: decodes first, oldest first; then chunks of admitted prompts; then new prompts while budget is left.
4. apply: what was planned is computed, full blocks are published; a slice that reached the last known token samples
   one more, and with n > 1 one for each sequence that goes on from here: they share all blocks, the last partial one
   until somebody writes to it (engine.room).
5. out of blocks: the youngest sequences not in this plan give theirs up (preempted), just enough of them, and go to the
   front of the queue, swapped out or with nothing computed. If that would not suffice nobody is preempted and the
   sequence waits. So the oldest always moves on.
6. end: a stop rule fires or abort is called; the blocks are released. If a plan in flight uses them, that waits for
   apply; if the sequence ended with its prompt, for the next schedule, so that a push can retain them first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.admission import Admission
from engine.block_pool import BlockPool
from engine.events import Computed, Event, Finished, Sampled
from engine.plan import Plan, Result, SequenceSlice
from engine.prefix_cache import Entry
from engine.prefixes import Prefix, Prefixes
from engine.queues import Queues
from engine.room import Room
from engine.sequence import SequenceState
from engine.swap_space import SwapSpace
from kvrelay.blocks import BlockTable, blocks_for
from kvrelay.requests import SequenceKey, SequenceSpec

MAX_PASSES = 16
"""Steps in which younger prompts may be admitted past one that does not fit; then it blocks those behind it."""
LOOKAHEAD = 64
"""Waiting prompts looked at in one step."""
MATCHED_AHEAD = 4
"""So many of them are matched with the cache even if they do not fit without it."""
MATCHED_BLOCKS = 4096
"""Cached blocks that the admissions of one step take up; then the next step goes on."""


@dataclass(frozen=True, slots=True)
class Budgets:
    """What a step may hold. The difference between a prefill and a decode worker is a difference of budgets.

    max_tokens bounds all rows of a step, max_sequences the sequences admitted at a time, max_prefill_tokens (None: no
    bound) the rows of prompts in a step that decodes too.
    """

    max_tokens: int = 512
    max_sequences: int = 256
    max_prefill_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_tokens", "max_sequences", "max_prefill_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")


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
        self._queued_tokens = 0
        self._num_arrivals = 0
        self._num_steps = 0
        self._plan: Plan | None = None
        self._planned: list[SequenceState] = []  # of the plan being made or in flight, slice by slice
        self._slices: list[SequenceSlice] = []
        self._last_resort = False
        self._max_prompt_tokens: int | None = None
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
        (self._queues.ready if is_ready else self._queues.waiting).append(seq)

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
        self._max_prompt_tokens = max_prompt_tokens
        assert self._plan is None, f"step {self._num_steps} was not applied"
        while self._ended:
            self.room.release(self._ended.pop())
        while self._queues.ready and len(self._queues.running) < self._budgets.max_sequences:
            self._queues.run(self._queues.ready.popleft(), promised=0)
        self._plan_slices()
        if not self._slices and self._sequences:
            self._last_resort = True
            self._plan_slices()
            self._last_resort = False
        room = self.room
        self._queued_tokens += room.take_lost() - self._admission.take_found()
        if not self._slices:
            return None
        self._num_steps += 1
        moves = tuple(room.copies), tuple(room.swap_out), tuple(room.swap_in)
        self._plan = Plan(self._num_steps, tuple(self._slices), *moves)
        self._slices = []
        return self._plan

    def apply(self, plan: Plan, result: Result) -> tuple[Event, ...]:
        """Take in what the plan in flight computed. Rows of sequences aborted since then are dropped.

        Blocks named by a Computed event stay HELD at least until the next schedule, also if the sequence ended.
        """
        assert plan is self._plan, f"step {plan.step_id} is not in flight"
        assert result.step_id == plan.step_id, f"result of step {result.step_id} for step {plan.step_id}"
        assert len(result.token_ids) == plan.num_samples, f"{len(result.token_ids)} tokens, want {plan.num_samples}"
        tokens = iter(result.token_ids)
        self.room.settle()
        of_schedule: list[Event] = [*self.room.take_events(), *self._admission.take_events()]
        events = [event for event in of_schedule if event.key in self._sequences]
        planned, self._planned, self._plan = self._planned, [], None
        for rows, seq in zip(plan.slices, planned, strict=True):
            token_id = next(tokens) if rows.samples else None
            forked = [next(tokens) for _ in rows.forks]
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
            if forked:
                events += [Sampled(rows.key, rows.index, token_id)] if token_id is not None else []
                self._fork(seq, rows, forked, events)
            if token_id is not None:
                self._append(seq, rows, token_id, events)
        return tuple(events)

    def _fork(self, seq: SequenceState, rows: SequenceSlice, token_ids: list[int], events: list[Event]) -> None:
        """Sequences 1, 2, ... of the request go on from here, sharing every block, each with a token of its own."""
        spec = seq.spec
        seq.spec = replace(spec, n=1)
        for number, token_id in enumerate(token_ids, 1):
            key = replace(spec.key, sequence=number)
            events.append(Sampled(key, rows.index, token_id))
            reason = spec.stop.finish_of(rows.index, token_id)
            if reason is not None:
                events.append(Finished(key, reason, rows.index + 1))
                continue
            held = seq.block_ids[: blocks_for(seq.num_computed, self._block_size)]
            self._pool.retain(held)
            own = replace(spec, key=key, n=1, sampling=rows.forks[number - 1])
            child = seq.fork(own, self._num_arrivals, held, len(held) * self._block_size, token_id)
            self._enter(child)

    def _append(self, seq: SequenceState, rows: SequenceSlice, token_id: int, events: list[Event]) -> None:
        if not rows.forks:
            events.append(Sampled(rows.key, rows.index, token_id))
        seq.known.append(token_id)
        self._queued_tokens += 1
        reason = seq.spec.stop.finish_of(rows.index, token_id)
        if reason is None:
            return
        self._forget(seq)
        if rows.start < seq.prompt_end:
            self._ended.append(seq)
        else:
            self.room.release(seq)
        events.append(Finished(rows.key, reason, rows.index + 1))

    def _plan_slices(self) -> None:
        """Fill the step. As a last resort, when nothing could run, anyone younger or waiting may be preempted."""
        left = self._plan_decodes(self._budgets.max_tokens)
        if self._slices and self._budgets.max_prefill_tokens is not None:
            left = min(left, self._budgets.max_prefill_tokens)
        if self._max_prompt_tokens is not None:
            left = min(left, self._max_prompt_tokens)
        left = self._plan_prompts(left)
        if self._last_resort and not self._queues.running and self._queues.waiting:
            self._make_room(self._queues.waiting[0])
        self._admit(left)

    def _plan_decodes(self, left: int) -> int:
        """Plan the one uncomputed token of each running sequence that has just one; returns the budget left."""
        for seq in tuple(self._queues.running):
            if not left:
                break
            if len(seq.known) - seq.num_computed != 1 or not seq.running:
                continue
            if seq.shared_tail and not self.room.own_tail(seq, self._last_resort):
                continue
            if seq.num_computed < seq.slots or self.room.grow(seq, 1, self._last_resort):
                self._plan_slice(seq, 1)
                left -= 1
        return left

    def _plan_prompts(self, left: int) -> int:
        """Plan chunks of admitted prompts; returns the budget left."""
        for seq in [s for s in self._queues.running if not s.planned and s.num_uncomputed > 1]:
            if seq.running:
                left -= self._plan_chunk(seq, left)
        return left

    def _admit(self, left: int) -> None:
        """Admit waiting prompts while budget, rows and blocks last; small ones may pass a big one MAX_PASSES times."""
        queues = self._queues
        passed: list[SequenceState] = []
        num_overtaken = 0
        enough = self._admission.num_matched_blocks + MATCHED_BLOCKS
        for _ in range(min(len(queues.waiting), LOOKAHEAD)):
            if not left or len(queues.running) >= self._budgets.max_sequences:
                break
            if self._admission.num_matched_blocks >= enough:
                break
            seq = queues.waiting.popleft()
            if self._admission.run_if_fits(seq, try_hard=len(passed) < MATCHED_AHEAD):
                num_overtaken = len(passed)
                left -= self._plan_chunk(seq, left)
                continue
            passed.append(seq)
            if seq.times_passed >= MAX_PASSES:
                break
        for seq in passed[:num_overtaken]:
            seq.times_passed += 1
        queues.waiting.extendleft(reversed(passed))

    def _plan_chunk(self, seq: SequenceState, left: int) -> int:
        """Plan as many of its uncomputed tokens as the budget holds; returns how many, 0 if it must wait for blocks."""
        num_tokens = min(left, seq.num_uncomputed)
        if not num_tokens or not self.room.grow(seq, num_tokens, self._last_resort):
            return 0
        if seq.shared_tail and not self.room.own_tail(seq, self._last_resort):
            return 0
        self._plan_slice(seq, num_tokens)
        return num_tokens

    def _plan_slice(self, seq: SequenceState, num_tokens: int) -> None:
        start = seq.num_computed
        end = start + num_tokens
        known = seq.known
        spec = seq.spec
        token_ids = (known[start],) if num_tokens == 1 else tuple(known[start:end])
        table = BlockTable(0, self._block_size, seq.block_ids, end)
        index = len(known) - spec.num_prompt_tokens
        samples = end == len(known)
        forks = tuple([spec.sampling.of_sequence(i) for i in range(1, spec.n)]) if spec.n > 1 and samples else ()
        self._slices.append(SequenceSlice(spec.key, token_ids, start, table, samples, index, spec.sampling, forks))
        self._planned.append(seq)
        seq.planned = True

    def _make_room(self, seq: SequenceState) -> None:
        """Nothing runs and the head does not fit: take the blocks of sequences that wait with some."""
        shortage = self._admission.missing(seq) - self._pool.num_free
        if shortage > 0:
            self.room.preempt_for(seq, shortage, last_resort=True)

    def _forget(self, seq: SequenceState) -> None:
        del self._sequences[seq.spec.key]
        self._queued_tokens -= seq.num_uncomputed
        self._queues.remove(seq)
