"""Attention in pools of many gigabytes: a block's place is worked out in 64 bits, or it would be another block's."""

from __future__ import annotations

import mmap

import pytest
import torch

from engine.attention.cpu import CpuAttention
from engine.attention.reference import ReferenceAttention
from engine.native import NativeUnavailable, load
from engine.tensors import StepBatch

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, LAYERS = 9, 3, 64, 16, 2
ELEMENTS = KV_HEADS * LAYERS * 2 * BLOCK_SIZE * HEAD_DIM
MAP_NORESERVE = 0x4000
"""Linux; Python's mmap has no name for it before 3.13."""
NEAR = (1, 2)
FAR = {border: ((1 << border) // ELEMENTS, (1 << border) // ELEMENTS + 1) for border in (30, 31, 32)}
"""Two blocks around 2**30, 2**31 and 2**32 elements, which are 2, 4 and 8 GiB of bfloat16."""
SHAPE = (FAR[32][1] + 1, KV_HEADS, LAYERS, 2, BLOCK_SIZE, HEAD_DIM)
ANGLES = torch.outer(torch.arange(64).float(), 1e4 ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM))
ROPE = torch.cat((ANGLES.cos(), ANGLES.sin()), dim=-1)


def sparse_pool() -> torch.Tensor:
    """Zeros that take no memory until they are written to."""
    num_bytes = SHAPE[0] * ELEMENTS * 2
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    return torch.frombuffer(mapping, dtype=torch.bfloat16).view(SHAPE)


def step(start: int, rows: int, table: tuple[int, int]) -> StepBatch:
    """Positions start .. start + rows - 1 of a sequence in these two blocks."""
    positions = torch.arange(start, start + rows, dtype=torch.int32)
    table_of = torch.tensor([table], dtype=torch.int32)
    return StepBatch(
        token_ids=torch.zeros(rows, dtype=torch.int64),
        positions=positions,
        slot_blocks=table_of[0][(positions // BLOCK_SIZE).long()].contiguous(),
        slot_offsets=positions % BLOCK_SIZE,
        cu_seqlens_q=torch.tensor([0, rows], dtype=torch.int32),
        context_lens=torch.tensor([start + rows], dtype=torch.int32),
        block_tables=table_of,
        sample_rows=torch.zeros(0, dtype=torch.int64),
    )


def attended(backend: CpuAttention | ReferenceAttention, pool: torch.Tensor, table: tuple[int, int]) -> torch.Tensor:
    """A prompt of 20 tokens, then one more that reads them all."""
    outs = []
    for start, rows in ((0, 20), (20, 1)):
        width = (HEADS + 2 * KV_HEADS) * HEAD_DIM
        qkv = torch.randn(rows, width, generator=torch.Generator().manual_seed(start))
        out = qkv.new_empty(rows, HEADS * HEAD_DIM)
        backend.forward(1, qkv, pool, step(start, rows, table), ROPE, out)
        outs.append(out)
    return torch.cat(outs)


@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_blocks_beyond_2_4_and_8_gib_hold_and_give_what_near_ones_do(name: str) -> None:
    try:
        native = CpuAttention(load(""), HEADS, KV_HEADS, HEAD_DIM, threads=1)
    except NativeUnavailable as error:
        pytest.skip(str(error))
    backend = native if name == "cpu" else ReferenceAttention(HEADS, KV_HEADS, HEAD_DIM)
    pool = sparse_pool()
    near = attended(backend, pool, NEAR)
    written = pool[list(NEAR)].clone()
    assert written.count_nonzero() > 0
    pool[list(NEAR)] = 0
    for table in FAR.values():
        assert torch.equal(attended(backend, pool, table), near)
        assert torch.equal(pool[list(table)], written)
        assert pool[:3].count_nonzero() == 0
