"""Where every input tensor of a step is born: a plan in, tensors out. Knows no model and no pool."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.plan import Plan
from kvrelay.blocks import blocks_for

Int32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """A step as one flat batch: the rows of all sequences one after another, in the order of the plan."""

    token_ids: torch.Tensor
    """int64 [num_tokens]"""
    positions: torch.Tensor
    """int32 [num_tokens]: where in its sequence a row's token stands"""
    slot_blocks: torch.Tensor
    """int32 [num_tokens]: the block that takes a row's KV"""
    slot_offsets: torch.Tensor
    """int32 [num_tokens]: the token slot inside that block"""
    cu_seqlens_q: torch.Tensor
    """int32 [num_seqs + 1]: sequence i owns rows cu_seqlens_q[i] .. cu_seqlens_q[i + 1] - 1"""
    context_lens: torch.Tensor
    """int32 [num_seqs]: tokens the last row of a sequence sees, itself included"""
    block_tables: torch.Tensor
    """int32 [num_seqs, max_blocks]: the blocks that hold those tokens; unused entries are 0"""
    sample_rows: torch.Tensor
    """int64 [num_samples]: the rows whose logits are wanted"""

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]


def step_batch(plan: Plan) -> StepBatch:
    """The tensors of a plan with at least one slice; all tables have one block size."""
    slices = plan.slices
    block_size = slices[0].table.block_size
    lens = _int32([len(s.token_ids) for s in slices])
    starts = _int32([s.start for s in slices])
    cu_seqlens = np.zeros(len(slices) + 1, dtype=np.int32)
    np.cumsum(lens, out=cu_seqlens[1:])
    context_lens = starts + lens
    tables = _block_tables([s.table.block_ids for s in slices], [blocks_for(s.context_len, block_size) for s in slices])
    num_tokens = int(cu_seqlens[-1])
    # A row's position: its sequence's start plus its distance from the sequence's first row.
    positions = np.arange(num_tokens, dtype=np.int32) + np.repeat(starts - cu_seqlens[:-1], lens)
    sequences = np.repeat(np.arange(len(slices)), lens)
    return StepBatch(
        token_ids=torch.from_numpy(_flat((s.token_ids for s in slices), num_tokens, np.int64)),
        positions=torch.from_numpy(positions),
        slot_blocks=torch.from_numpy(tables[sequences, positions // block_size]),
        slot_offsets=torch.from_numpy(positions % block_size),
        cu_seqlens_q=torch.from_numpy(cu_seqlens),
        context_lens=torch.from_numpy(context_lens),
        block_tables=torch.from_numpy(tables),
        sample_rows=torch.from_numpy(
            np.array([end - 1 for s, end in zip(slices, cu_seqlens[1:].tolist(), strict=True) if s.samples], np.int64)
        ),
    )


def _int32(values: Sequence[int]) -> Int32:
    return np.array(values, dtype=np.int32)


def _flat(parts: Iterable[Sequence[int]], count: int, dtype: type[Any]) -> npt.NDArray[Any]:
    return np.fromiter(chain.from_iterable(parts), dtype=dtype, count=count)


def _block_tables(block_ids: Sequence[tuple[int, ...]], used: Sequence[int]) -> Int32:
    """[num_seqs, max(used)]; a table may hold blocks for tokens to come, which this step does not need."""
    counts = _int32(used)
    tables = np.zeros((len(used), int(counts.max())), dtype=np.int32)
    flat = _flat((ids[:count] for ids, count in zip(block_ids, used, strict=True)), int(counts.sum()), np.int32)
    tables[np.arange(tables.shape[1]) < counts[:, None]] = flat
    return tables
