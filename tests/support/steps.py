"""Plans by hand: slices of made-up sequences, for tests of what is below the scheduler."""

from __future__ import annotations

from collections.abc import Sequence

from engine.plan import Plan, SequenceSlice
from kvrelay.blocks import BlockTable, blocks_for
from kvrelay.requests import RequestId, Sampling, SequenceKey, SessionId

GREEDY = Sampling(temperature=0.0)


def part(
    name: str,
    token_ids: Sequence[int],
    start: int,
    block_ids: Sequence[int],
    *,
    block_size: int = 16,
    samples: bool = True,
    index: int = 0,
    sampling: Sampling = GREEDY,
) -> SequenceSlice:
    """Rows of one sequence: tokens at positions start .., their KV in the blocks given."""
    end = start + len(token_ids)
    assert blocks_for(end, block_size) <= len(block_ids)
    key = SequenceKey(SessionId("s"), RequestId(name), attempt=0)
    table = BlockTable(0, block_size, tuple(block_ids), end)
    return SequenceSlice(key, tuple(token_ids), start, table, samples, index, sampling)


def plan(*slices: SequenceSlice, step_id: int = 0) -> Plan:
    return Plan(step_id, slices)
