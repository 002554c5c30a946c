"""A model without weights, for tests of everything around a model: its next token is a hash of the KV it reads.

Each token's K and V row is a hash of the token, its position and the bytes of *all* earlier rows as they lie in the
pool now, read through the block table. So any wrong, stale, shifted or missing byte changes what comes after it, while
batching, chunking, preemption and the blocks used change nothing (the block size does: it is part of the layout).
A draw that asks for more than a token of the bare model gets it from logits made of the same hash, with the token of
greedy sampling as their best. Standard library only until then; knows no clock.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from engine.memory import HostPool
from engine.moves import carry_out
from engine.plan import Plan, Result, SequenceSlice
from kvrelay.blocks import KVLayout
from kvrelay.requests import Logprobs, Sampling

if TYPE_CHECKING:
    from engine.sampler import Masks

HEAD_DIM = 32
LEAD = 1.0
"""Of the greedy token's logit over the next."""
_GREEDY = Sampling(temperature=0.0)

Says = Callable[["hashlib.blake2b", Sampling, int], int]
"""The token after KV of this hash, by a sampling, at an output index."""


def hash_layout(block_size: int) -> KVLayout:
    """One head, one layer, rows of 32 bytes: a block is a tile of K rows, then a tile of V rows."""
    return KVLayout(kv_heads=1, layers=1, block_size=block_size, head_dim=HEAD_DIM, dtype="uint8")


class HashExecutor:
    """Executor whose tokens are in 0 .. vocab_size-1; eos_token_id is one of them and comes up by chance.

    step_seconds, with a `pause` such as time.sleep, makes each step last longer: a slow model; and token_seconds does
    for each token of a prompt. grammars: made for these tokens; None: draws that have a grammar fail.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        vocab_size: int = 258,
        eos_token_id: int = 257,
        step_seconds: float = 0.0,
        pause: Callable[[float], None] | None = None,
        swap_blocks: int = 0,
        grammars: Masks | None = None,
        token_seconds: float = 0.0,
    ) -> None:
        if not 0 <= eos_token_id < vocab_size:
            raise ValueError(f"eos_token_id {eos_token_id} is not in a vocabulary of {vocab_size}")
        if (step_seconds > 0 or token_seconds > 0) and pause is None:
            raise ValueError("step_seconds and token_seconds need a pause function")
        self.layout = hash_layout(block_size)
        self.pool = HostPool(self.layout, num_blocks)
        self.swap = HostPool(self.layout, swap_blocks) if swap_blocks else None
        self.vocab_size = vocab_size
        self.eos_token_id = eos_token_id
        self._step_seconds, self._token_seconds = step_seconds, token_seconds
        self._pause = pause
        self._grammars = grammars

    def run(self, plan: Plan) -> Result:
        """Slices are computed one after another; a sequence reads nothing but its own blocks."""
        return self.run_saying(plan, self._next_token, LEAD)

    def run_saying(self, plan: Plan, says: Says, lead: float) -> Result:
        """As run, with tokens of another model. lead: of the logit of what it says greedily over the next."""
        carry_out(plan, self.pool, self.swap)
        answers = _Answers()
        for rows in plan.slices:
            prefix = self._write_rows(rows)
            if not rows.samples:
                continue
            if rows.past is None and rows.sampling.plain:
                answers.say([says(prefix, s, rows.index) for s in (rows.sampling, *rows.forks)])
            else:
                from engine.pseudo_logits import draw

                favourite = says(prefix, _GREEDY, rows.index)
                drawn = draw(rows, prefix.digest(), self.vocab_size, favourite, lead, self._grammars)
                answers.say(drawn.token_ids, drawn.logprobs, drawn.failures)
        self._last_longer(plan)
        return answers.result(plan.step_id)

    def _last_longer(self, plan: Plan) -> None:
        seconds = self._step_seconds
        if self._token_seconds > 0:
            seconds += self._token_seconds * sum(len(s.token_ids) for s in plan.slices if len(s.token_ids) > 1)
        if seconds > 0 and self._pause is not None:
            self._pause(seconds)

    def close(self) -> None:
        self.pool.close()
        if self.swap is not None:
            self.swap.close()

    def _write_rows(self, rows: SequenceSlice) -> hashlib.blake2b:
        """Write the K and V rows of a slice; returns the hash state after all rows up to its last.

        The state of full blocks is carried along inside a slice; it is made of bytes read back from the pool.
        """
        block_size = self.layout.block_size
        block_ids = rows.table.block_ids
        full = hashlib.blake2b(b"".join(map(self.pool.read, block_ids[: rows.start // block_size])), digest_size=32)
        for position, token_id in enumerate(rows.token_ids, rows.start):
            logical, slot = divmod(position, block_size)
            if slot == 0 and position > rows.start:
                full.update(self.pool.read(block_ids[logical - 1]))
            self._write_row(block_ids[logical], slot, token_id, position, self._prefix(full, block_ids[logical], slot))
        logical, slot = divmod(rows.context_len - 1, block_size)
        return self._prefix(full, block_ids[logical], slot + 1)

    def _prefix(self, full: hashlib.blake2b, block_id: int, num_rows: int) -> hashlib.blake2b:
        """Hash of all full blocks and the first num_rows rows of the block after them, if any."""
        state = full.copy()
        block = self.pool.read(block_id)
        if num_rows == self.layout.block_size:
            state.update(block)
        elif num_rows:
            tile = self.layout.block_size * HEAD_DIM
            state.update(block[: num_rows * HEAD_DIM])
            state.update(block[tile : tile + num_rows * HEAD_DIM])
        return state

    def _write_row(self, block_id: int, slot: int, token_id: int, position: int, prefix: hashlib.blake2b) -> None:
        row = hashlib.blake2b(prefix.digest(), digest_size=2 * HEAD_DIM)
        row.update(b"%d at %d" % (token_id, position))
        data = row.digest()
        tile = self.layout.block_size * HEAD_DIM
        self.pool.write(block_id, slot * HEAD_DIM, data[:HEAD_DIM])
        self.pool.write(block_id, tile + slot * HEAD_DIM, data[HEAD_DIM:])

    def _next_token(self, prefix: hashlib.blake2b, sampling: Sampling, index: int) -> int:
        state = hashlib.blake2b(prefix.digest(), digest_size=8)
        if not sampling.greedy:
            state.update(b"seed %d index %d" % (sampling.seed, index))
        return int.from_bytes(state.digest(), "little") % self.vocab_size


class _Answers:
    """A result as it grows, slice by slice."""

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._logprobs: dict[int, Logprobs | None] = {}
        self._failures: list[tuple[int, str]] = []

    def say(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[Logprobs | None] = (),
        failures: Sequence[tuple[int, str]] = (),
    ) -> None:
        first = len(self._token_ids)
        self._token_ids += token_ids
        self._logprobs.update(enumerate(logprobs, first))
        self._failures += [(first + at, words) for at, words in failures]

    def result(self, step_id: int) -> Result:
        told = self._logprobs
        logprobs = tuple([told.get(at) for at in range(len(self._token_ids))]) if told else ()
        return Result(step_id, tuple(self._token_ids), None, logprobs, tuple(self._failures))
