"""Decides what each step computes: budgets, chunks, admission, preemption. Knows no tensors, clocks or services.

There is no prefill phase and no decode phase: each sequence has *known* tokens and *computed* tokens (KV exists), and
a step computes some of the difference. A sequence whose prompt was computed elsewhere merely starts with more of them.

The life of a sequence here:
1. add: those that own blocks for all known tokens (handed over) are `ready`, the others `waiting` in FIFO order.
2. admit: ready ones when a row is free; waiting ones when their whole known length + 1 fits into free blocks that are
   promised to nobody. The missing blocks are then promised, and taken as tokens are computed.
3. schedule: decodes first, oldest first; then chunks of admitted prompts; then new prompts while budget is left.
4. apply: what was planned is computed; a slice that reached the last known token samples one more.
5. out of blocks: the youngest sequences not in this plan give theirs up (preempted), just enough of them, and go to the
   front of the queue with nothing computed. If that would not suffice nobody is preempted and the sequence waits. So
   the oldest always moves on.
6. end: a stop rule fires or abort is called; the blocks are released, for a sequence in a plan in flight only at apply.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from engine.block_pool import BlockPool
from engine.events import Computed, Event, Finished, Preempted, Sampled
from engine.plan import Plan, Result, SequenceSlice
from engine.sequence import SequenceState
from kvrelay.blocks import BlockTable, blocks_for
from kvrelay.requests import SequenceKey, SequenceSpec

MAX_PASSES = 16
"""Steps in which younger prompts may be admitted past one that does not fit; then it blocks those behind it."""
LOOKAHEAD = 64
"""Waiting prompts looked at in one step."""


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
    """One per engine. It owns the blocks of its sequences; all calls come from the engine thread."""

    def __init__(self, pool: BlockPool, block_size: int, budgets: Budgets) -> None:
        self._pool = pool
        self._block_size = block_size
        self._budgets = budgets
        self._sequences: dict[SequenceKey, SequenceState] = {}
        self._running: list[SequenceState] = []  # oldest first
        self._ready: deque[SequenceState] = deque()
        self._waiting: deque[SequenceState] = deque()
        self._promised = 0  # blocks of running prompts, granted and not taken yet
        self._queued_tokens = 0
        self._num_arrivals = 0
        self._num_steps = 0
        self._plan: Plan | None = None
        self._planned: list[SequenceState] = []  # of the plan being made or in flight, slice by slice
        self._slices: list[SequenceSlice] = []
        self._events: list[Event] = []  # of schedule, handed out by the next apply

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._ready) + len(self._waiting)

    @property
    def queued_tokens(self) -> int:
        """Known tokens, of all sequences, whose KV has yet to be computed."""
        return self._queued_tokens

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    @property
    def spare_blocks(self) -> int:
        """Free blocks that may go to others (tickets) without taking what sequences here are about to need:
        promised blocks, one for each running sequence, and those the first waiting prompt is waiting for."""
        head = self._missing_blocks(self._waiting[0]) if self._waiting else 0
        return max(0, self._pool.num_free - self._promised - len(self._running) - head)

    def fits_alone(self, spec: SequenceSpec) -> bool:
        """Whether the whole pool could hold it to its last token. Callers refuse what does not fit before adding it."""
        slots = spec.num_prompt_tokens + spec.stop.max_tokens - 1
        return blocks_for(slots, self._block_size) <= self._pool.num_blocks

    def add(self, spec: SequenceSpec, *, block_ids: tuple[int, ...] = (), num_computed: int = 0) -> None:
        """Queue a sequence whose first num_computed tokens have their KV in block_ids.

        The scheduler takes over the caller's reference to each block and releases it when the sequence ends.
        """
        assert spec.key not in self._sequences, f"{spec.key} is already here"
        assert 0 <= num_computed < len(spec.token_ids), f"{num_computed} of {len(spec.token_ids)} tokens computed"
        assert spec.first_index < spec.stop.max_tokens, f"{spec.key} has nothing left to sample"
        assert self.fits_alone(spec), f"{spec.key} can never fit a pool of {self._pool.num_blocks} blocks"
        slots = len(block_ids) * self._block_size
        assert num_computed <= slots, f"{num_computed} computed tokens in {len(block_ids)} blocks"
        seq = SequenceState(spec, self._num_arrivals, block_ids, num_computed, slots)
        self._num_arrivals += 1
        self._sequences[spec.key] = seq
        self._queued_tokens += seq.num_uncomputed
        (self._ready if slots >= len(seq.known) else self._waiting).append(seq)

    def abort(self, key: SequenceKey) -> bool:
        """Forget a sequence and release its blocks, at apply if a plan in flight uses them. False if it is not here."""
        seq = self._sequences.get(key)
        if seq is None:
            return False
        self._forget(seq)
        if seq.planned:
            seq.aborted = True
        else:
            self._release(seq)
        return True

    def schedule(self) -> Plan | None:
        """The next step, or None when nothing can run now. Its apply must come before the next schedule."""
        assert self._plan is None, f"step {self._num_steps} was not applied"
        while self._ready and len(self._running) < self._budgets.max_sequences:
            self._run(self._ready.popleft())
        left = self._plan_decodes(self._budgets.max_tokens)
        if self._slices and self._budgets.max_prefill_tokens is not None:
            left = min(left, self._budgets.max_prefill_tokens)
        left = self._plan_prompts(left)
        self._admit(left)
        if not self._slices and not self._running and self._waiting and self._make_room(self._waiting[0]):
            self._admit(left)
        if not self._slices:
            return None
        self._num_steps += 1
        self._plan = Plan(self._num_steps, tuple(self._slices))
        self._slices = []
        return self._plan

    def apply(self, plan: Plan, result: Result) -> tuple[Event, ...]:
        """Take in what the plan in flight computed. Rows of sequences aborted since then are dropped."""
        assert plan is self._plan, f"step {plan.step_id} is not in flight"
        assert result.step_id == plan.step_id, f"result of step {result.step_id} for step {plan.step_id}"
        assert len(result.token_ids) == plan.num_samples, f"{len(result.token_ids)} tokens, want {plan.num_samples}"
        tokens = iter(result.token_ids)
        events, self._events = self._events, []
        planned, self._planned, self._plan = self._planned, [], None
        for rows, seq in zip(plan.slices, planned, strict=True):
            token_id = next(tokens) if rows.samples else None
            seq.planned = False
            if seq.aborted:
                self._release(seq)
                continue
            if rows.start < seq.prompt_end:
                events.append(Computed(rows.key, rows.context_len, rows.table))
            seq.num_computed += len(rows.token_ids)
            self._queued_tokens -= len(rows.token_ids)
            if token_id is not None:
                self._append(seq, rows.index, token_id, events)
        return tuple(events)

    def _append(self, seq: SequenceState, index: int, token_id: int, events: list[Event]) -> None:
        key = seq.spec.key
        events.append(Sampled(key, index, token_id))
        seq.known.append(token_id)
        self._queued_tokens += 1
        reason = seq.spec.stop.finish_of(index, token_id)
        if reason is not None:
            self._forget(seq)
            self._release(seq)
            events.append(Finished(key, reason, index + 1))

    def _plan_decodes(self, left: int) -> int:
        """Plan the one uncomputed token of each running sequence that has just one; returns the budget left."""
        for seq in tuple(self._running):
            if not left:
                break
            if len(seq.known) - seq.num_computed == 1 and seq.running and self._grow(seq, 1):
                self._plan_slice(seq, 1)
                left -= 1
        return left

    def _plan_prompts(self, left: int) -> int:
        """Plan chunks of admitted prompts; returns the budget left."""
        for seq in [s for s in self._running if not s.planned and s.num_uncomputed > 1]:
            num_tokens = min(left, seq.num_uncomputed)
            if num_tokens and seq.running and self._grow(seq, num_tokens):
                self._plan_slice(seq, num_tokens)
                left -= num_tokens
        return left

    def _admit(self, left: int) -> None:
        """Admit waiting prompts while budget, rows and blocks last; small ones may pass a big one MAX_PASSES times."""
        passed: list[SequenceState] = []
        for _ in range(min(len(self._waiting), LOOKAHEAD)):
            if not left or len(self._running) >= self._budgets.max_sequences:
                break
            seq = self._waiting.popleft()
            if self._missing_blocks(seq) > self._pool.num_free - self._promised:
                passed.append(seq)
                if seq.times_passed >= MAX_PASSES:
                    break
                continue
            self._run(seq)
            num_tokens = min(left, seq.num_uncomputed)
            grown = self._grow(seq, num_tokens)
            assert grown, f"{seq.spec.key} was admitted without blocks"
            self._plan_slice(seq, num_tokens)
            left -= num_tokens
            for other in passed:
                other.times_passed += other.arrival < seq.arrival or not other.times_passed
        self._waiting.extendleft(reversed(passed))

    def _plan_slice(self, seq: SequenceState, num_tokens: int) -> None:
        start = seq.num_computed
        end = start + num_tokens
        known = seq.known
        spec = seq.spec
        token_ids = (known[start],) if num_tokens == 1 else tuple(known[start:end])
        table = BlockTable(0, self._block_size, seq.block_ids, end)
        index = len(known) - spec.num_prompt_tokens
        self._slices.append(SequenceSlice(spec.key, token_ids, start, table, end == len(known), index, spec.sampling))
        self._planned.append(seq)
        seq.planned = True

    def _run(self, seq: SequenceState) -> None:
        """Admit: keep `running` in order of arrival and promise the blocks it still lacks."""
        seq.promised = self._missing_blocks(seq) if seq.slots < len(seq.known) else 0
        self._promised += seq.promised
        seq.running = True
        at = len(self._running)
        while at and self._running[at - 1].arrival > seq.arrival:
            at -= 1
        self._running.insert(at, seq)

    def _missing_blocks(self, seq: SequenceState) -> int:
        """Blocks it lacks for its known tokens and one more, if it may come to compute one more."""
        slots = min(len(seq.known) + 1, seq.max_slots)
        return max(0, blocks_for(slots, self._block_size) - len(seq.block_ids))

    def _grow(self, seq: SequenceState, num_tokens: int) -> bool:
        """Take the blocks that num_tokens more tokens need, from younger sequences if none are free."""
        missing_slots = seq.num_computed + num_tokens - seq.slots
        if missing_slots <= 0:
            return True
        missing = blocks_for(missing_slots, self._block_size)
        if missing > self._pool.num_free and not self._preempt_for(seq, missing - self._pool.num_free):
            return False
        new = self._pool.allocate(missing)
        assert new is not None, f"{missing} blocks are not free after preemption"
        seq.block_ids += new
        seq.slots += missing * self._block_size
        kept = min(seq.promised, missing)
        seq.promised -= kept
        self._promised -= kept
        return True

    def _make_room(self, seq: SequenceState) -> bool:
        """Nothing runs and the head does not fit: take the blocks of sequences that wait with some."""
        shortage = self._missing_blocks(seq) - self._pool.num_free
        return shortage > 0 and self._preempt_for(seq, shortage)

    def _preempt_for(self, seq: SequenceState, shortage: int) -> bool:
        """Free `shortage` blocks by preempting no more sequences than needed; nobody if that cannot be reached.

        Blocks that someone else refers to as well (a push under way) would not become free and do not count.
        """
        victims: list[SequenceState] = []
        for victim in self._victims(seq):
            frees = self._pool.num_sole(victim.block_ids)
            if frees:
                victims.append(victim)
                shortage -= frees
            if shortage <= 0:
                break
        if shortage > 0:
            return False
        for victim in victims:
            self._preempt(victim)
        return True

    def _victims(self, seq: SequenceState) -> Iterator[SequenceState]:
        """Sequences younger than seq, youngest first, that are not in this plan; before a standstill those waiting."""
        for other in reversed(self._running):
            if other.arrival <= seq.arrival:
                break
            if not other.planned:
                yield other
        if not self._slices:
            holders = [s for s in chain(self._ready, self._waiting) if s.block_ids and s is not seq]
            yield from sorted(holders, key=lambda s: -s.arrival)

    def _preempt(self, seq: SequenceState) -> None:
        """Drop its blocks and put it to the front of the queue; known tokens and output index stay."""
        self._unqueue(seq)
        self._release(seq)
        self._queued_tokens += seq.num_computed
        seq.num_computed = 0
        seq.prompt_end = len(seq.known)
        seq.preemptions += 1
        self._waiting.appendleft(seq)
        self._events.append(Preempted(seq.spec.key))

    def _forget(self, seq: SequenceState) -> None:
        del self._sequences[seq.spec.key]
        self._queued_tokens -= seq.num_uncomputed
        self._unqueue(seq)

    def _unqueue(self, seq: SequenceState) -> None:
        if seq.running:
            self._running.remove(seq)
        elif seq in self._ready:
            self._ready.remove(seq)
        else:
            self._waiting.remove(seq)
        seq.running = False
        self._promised -= seq.promised
        seq.promised = 0

    def _release(self, seq: SequenceState) -> None:
        self._pool.release(seq.block_ids)
        seq.block_ids = ()
        seq.slots = 0
