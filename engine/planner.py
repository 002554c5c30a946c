"""Fills a step: decodes, then chunks of admitted prompts, then new prompts, within budgets. Ends no sequence."""

from __future__ import annotations

from operator import attrgetter

from engine.admission import Admission
from engine.block_pool import BlockPool
from engine.budgets import Budgets
from engine.plan import SequenceSlice
from engine.queues import Queues
from engine.room import Room
from engine.sequence import SequenceState

MAX_PASSES = 16
"""Steps in which younger prompts may be admitted past one that does not fit; then it blocks those behind it."""
LOOKAHEAD = 64
"""Waiting prompts looked at in one step."""
MATCHED_AHEAD = 4
"""So many of them are matched with the cache even if they do not fit without it."""
MATCHED_BLOCKS = 4096
"""Cached blocks that the admissions of one step take up; then the next step goes on."""


class Planner:
    """What a scheduler plans with; slices[i] of the plan being made is of planned[i]."""

    def __init__(
        self, pool: BlockPool, block_size: int, budgets: Budgets, queues: Queues, admission: Admission, room: Room
    ) -> None:
        self._pool = pool
        self._block_size = block_size
        self._budgets = budgets
        self._queues = queues
        self._admission = admission
        self._room = room
        self._planned: list[SequenceState] = []
        self._slices: list[SequenceSlice] = []
        self._last_resort = False
        self._max_prompt_tokens: int | None = None

    def fill(self, max_prompt_tokens: int | None) -> tuple[list[SequenceSlice], list[SequenceState]]:
        """The slices of a step, and the sequence of each, which is `planned` from now on; none if nothing can run.

        max_prompt_tokens: a bound on the rows of prompts, beside the budgets (None: no other).
        """
        self._max_prompt_tokens = max_prompt_tokens
        self._slices, self._planned = [], []
        self._fill()
        if not self._slices and (self._queues.running or self._queues.ready or self._queues.waiting):
            self._last_resort = True
            self._fill()
            if not self._slices and self._queues.inverted:
                self._room.preempt_all_running()
                self._queues.fill_rows(self._budgets.max_sequences)
                self._fill()
            self._last_resort = False
        return self._slices, self._planned

    def _fill(self) -> None:
        """As a last resort, when nothing could run, anyone of lower rank or waiting may be preempted."""
        left = self._plan_decodes(self._budgets.max_tokens)
        if self._slices and self._budgets.max_prefill_tokens is not None:
            left = min(left, self._budgets.max_prefill_tokens)
        if self._max_prompt_tokens is not None:
            left = min(left, self._max_prompt_tokens)
        left = self._plan_prompts(left)
        if self._last_resort and not self._queues.running and self._queues.waiting:
            self._make_room(self._queues.lead())
        self._admit(left)

    def _plan_decodes(self, left: int) -> int:
        """Plan the one uncomputed token of each running sequence that has just one; returns the budget left."""
        for seq in tuple(self._queues.running):
            if not left:
                break
            if len(seq.known) - seq.num_computed != 1 or not seq.running:
                continue
            if seq.shared_tail and not self._room.own_tail(seq, self._last_resort):
                continue
            if seq.num_computed < seq.slots or self._room.grow(seq, 1, self._last_resort):
                self._plan_slice(seq, 1)
                left -= 1
        return left

    def _plan_prompts(self, left: int) -> int:
        """Plan chunks of admitted prompts, each after those that wait and go before it; returns the budget left."""
        prompts = [s for s in self._queues.running if not s.planned and s.num_uncomputed > 1]
        prompts.sort(key=attrgetter("turn"))
        for seq in prompts:
            if self._queues.waiting and self._queues.waiting[0].goes_before(seq):
                left = self._admit(left, seq)
            if seq.running:
                left -= self._plan_chunk(seq, left)
        return left

    def _admit(self, left: int, before: SequenceState | None = None) -> int:
        """Admit waiting prompts while budget, rows and blocks last; small ones may pass a big one MAX_PASSES times.

        before: only such as go before it. Returns the budget left.
        """
        queues = self._queues
        passed: list[SequenceState] = []
        num_overtaken = 0
        enough = self._admission.num_matched_blocks + MATCHED_BLOCKS
        for _ in range(min(len(queues.waiting), LOOKAHEAD)):
            if not left or len(queues.running) >= self._budgets.max_sequences:
                break
            if self._admission.num_matched_blocks >= enough:
                break
            if before is not None and not queues.waiting[0].goes_before(before):
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
        return left

    def _plan_chunk(self, seq: SequenceState, left: int) -> int:
        """Plan as many of its uncomputed tokens as the budget holds; returns how many, 0 if it must wait for blocks."""
        num_tokens = min(left, seq.num_uncomputed)
        if not num_tokens or not self._room.grow(seq, num_tokens, self._last_resort):
            return 0
        if seq.shared_tail and not self._room.own_tail(seq, self._last_resort):
            return 0
        self._plan_slice(seq, num_tokens)
        return num_tokens

    def _plan_slice(self, seq: SequenceState, num_tokens: int) -> None:
        self._slices.append(seq.rows(num_tokens, self._block_size))
        self._planned.append(seq)
        seq.planned = True

    def _make_room(self, seq: SequenceState) -> None:
        """Nothing runs and the head does not fit: take the blocks of sequences that wait with some."""
        shortage = self._admission.missing(seq) - self._pool.num_free
        if shortage > 0:
            self._room.preempt_for(seq, shortage, last_resort=True)
