"""The native paged attention against the reference backend, and against itself bit for bit."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import pytest
import torch

from engine.attention.cpu import CpuAttention, cpu_attention
from engine.attention.reference import ReferenceAttention
from engine.native import NativeUnavailable, load, native_status
from engine.tensors import StepBatch

INSTRUCTION_SETS = ("generic", "avx2", "avx512")


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int = 16
    layers: int = 2
    num_blocks: int = 80


SMOL = Shape(9, 3, 64)


def backend(shape: Shape, instruction_set: str = "", threads: int = 1) -> CpuAttention:
    try:
        kernels = load(instruction_set)
    except NativeUnavailable as error:
        pytest.skip(str(error))
    return CpuAttention(kernels, shape.heads, shape.kv_heads, shape.head_dim, threads=threads)


def make_batch(shape: Shape, spans: list[tuple[int, int]], seed: int = 3) -> StepBatch:
    """spans: (context before the step, rows in the step) per sequence. Blocks are dealt out of order."""
    order = torch.randperm(shape.num_blocks - 1, generator=torch.Generator().manual_seed(seed)).add(1).tolist()
    positions, slots, offsets, tables, starts = [], [], [], [], [0]
    for start, rows in spans:
        table = [order.pop() for _ in range(-(-(start + rows) // shape.block_size))]
        tables.append(table)
        for p in range(start, start + rows):
            positions.append(p)
            slots.append(table[p // shape.block_size])
            offsets.append(p % shape.block_size)
        starts.append(starts[-1] + rows)
    width = max(map(len, tables))
    return StepBatch(
        token_ids=torch.zeros(len(positions), dtype=torch.int64),
        positions=_int(positions),
        slot_blocks=_int(slots),
        slot_offsets=_int(offsets),
        cu_seqlens_q=_int(starts),
        context_lens=_int([start + rows for start, rows in spans]),
        block_tables=_int([t + [0] * (width - len(t)) for t in tables]),
        sample_rows=torch.zeros(0, dtype=torch.int64),
    )


def _int(values: list[int] | list[list[int]]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def make_pool(shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    sizes = (shape.num_blocks, shape.kv_heads, shape.layers, 2, shape.block_size, shape.head_dim)
    return torch.randn(sizes, generator=torch.Generator().manual_seed(5)).to(dtype)


def make_qkv(shape: Shape, tokens: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    return torch.randn(tokens, width, generator=torch.Generator().manual_seed(9)).to(dtype)


def make_rope(shape: Shape, positions: int = 1100) -> torch.Tensor:
    angles = torch.outer(torch.arange(positions).float(), 1e4 ** -(torch.arange(0, shape.head_dim, 2) / shape.head_dim))
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def run(backend: CpuAttention | ReferenceAttention, shape: Shape, qkv: torch.Tensor, pool: torch.Tensor,
        batch: StepBatch) -> torch.Tensor:  # fmt: skip
    out = qkv.new_empty(qkv.shape[0], shape.heads * shape.head_dim)
    backend.forward(1, qkv, pool, batch, make_rope(shape), out)
    return out


def take(batch: StepBatch, sequence: int, first: int, rows: int) -> StepBatch:
    """Rows first .. first + rows of one sequence of `batch`, as a step of its own."""
    at = int(batch.cu_seqlens_q[sequence]) + first
    count = int(batch.cu_seqlens_q[sequence + 1] - batch.cu_seqlens_q[sequence])
    context = int(batch.context_lens[sequence]) - count + first + rows
    part = slice(at, at + rows)
    return StepBatch(
        token_ids=batch.token_ids[part],
        positions=batch.positions[part],
        slot_blocks=batch.slot_blocks[part],
        slot_offsets=batch.slot_offsets[part],
        cu_seqlens_q=_int([0, rows]),
        context_lens=_int([context]),
        block_tables=batch.block_tables[sequence : sequence + 1],
        sample_rows=batch.sample_rows,
    )


SPANS = [(0, 1), (5, 1), (63, 1), (100, 1), (0, 37), (50, 70), (128, 16)]


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize(
    ("shape", "pool_dtype"),
    [
        (SMOL, torch.bfloat16),
        (SMOL, torch.float32),
        (Shape(4, 4, 80, 8, num_blocks=120), torch.bfloat16),
        (Shape(8, 1, 96, 32), torch.bfloat16),
        (Shape(32, 8, 128, 64, 2, 30), torch.bfloat16),
        (Shape(2, 1, 256, 256, 2, 12), torch.float32),
        (Shape(64, 1, 16, 16), torch.bfloat16),
    ],
)
def test_the_result_and_the_written_kv_are_those_of_the_reference(shape, pool_dtype, instruction_set):
    batch = make_batch(shape, SPANS)
    qkv = make_qkv(shape, batch.num_tokens)
    mine, theirs = make_pool(shape, pool_dtype), make_pool(shape, pool_dtype)
    got = run(backend(shape, instruction_set), shape, qkv, mine, batch)
    expected = run(ReferenceAttention(shape.heads, shape.kv_heads, shape.head_dim), shape, qkv, theirs, batch)
    torch.testing.assert_close(mine, theirs, rtol=1e-5 if pool_dtype is torch.float32 else 1e-2, atol=1e-5)
    torch.testing.assert_close(got, expected, rtol=2e-3, atol=2e-3)


def test_bfloat16_activations_give_the_reference_result_rounded_once():
    batch = make_batch(SMOL, SPANS)
    qkv = make_qkv(SMOL, batch.num_tokens, torch.bfloat16)
    pool = make_pool(SMOL, torch.bfloat16)
    got = run(backend(SMOL), SMOL, qkv, pool.clone(), batch)
    expected = run(ReferenceAttention(9, 3, 64), SMOL, qkv, pool, batch)
    torch.testing.assert_close(got.float(), expected.float(), rtol=1e-2, atol=2e-3)


@pytest.mark.parametrize("pool_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [SMOL, Shape(8, 2, 128)])
def test_a_row_has_the_same_bits_decoded_alone_in_a_chunk_and_in_the_whole_prompt(shape, pool_dtype):
    attend = backend(shape)
    whole = make_batch(shape, [(0, 200), (30, 1), (0, 40)])
    qkv = make_qkv(shape, whole.num_tokens)
    expected_pool = make_pool(shape, pool_dtype)
    expected = run(attend, shape, qkv, expected_pool, whole)
    for cuts in ([7, 64, 65, 131, 200], [50, 100, 150, 200], list(range(1, 201))):
        pool, first = make_pool(shape, pool_dtype), 0
        for end in cuts:
            part = take(whole, 0, first, end - first)
            got = run(attend, shape, qkv[first:end].contiguous(), pool, part)
            assert torch.equal(got, expected[first:end])
            first = end
        table = whole.block_tables[0][:12].long()  # the blocks that are full
        assert torch.equal(pool[table][:, :, 1], expected_pool[table][:, :, 1])


def test_threads_and_block_size_do_not_change_a_bit():
    small, large = Shape(9, 3, 64, 8, num_blocks=200), Shape(9, 3, 64, 128, num_blocks=12)
    results = []
    for shape, threads in ((small, 1), (small, 2), (SMOL, 3), (large, 2)):
        batch = make_batch(shape, [(0, 150), (0, 33)])
        pool = torch.zeros_like(make_pool(shape, torch.bfloat16))
        results.append(run(backend(shape, threads=threads), shape, make_qkv(shape, 183), pool, batch))
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_slots_past_the_context_and_foreign_blocks_are_neither_read_nor_written():
    batch = make_batch(SMOL, [(20, 1), (0, 21)])
    qkv = make_qkv(SMOL, batch.num_tokens)
    clean = make_pool(SMOL, torch.bfloat16)
    expected = run(backend(SMOL), SMOL, qkv, clean.clone(), batch)
    poisoned = torch.full_like(clean, torch.nan)
    visible = torch.zeros_like(clean, dtype=torch.bool)
    for i in range(2):
        for p in range(21):
            visible[batch.block_tables[i][p // 16], :, 1, :, p % 16] = True
    poisoned[visible] = clean[visible]
    got = run(backend(SMOL), SMOL, qkv, poisoned, batch)
    assert torch.equal(got, expected)
    assert torch.isnan(poisoned[~visible]).all()


def test_very_large_scores_do_not_overflow():
    batch = make_batch(SMOL, [(0, 70)])
    qkv = make_qkv(SMOL, 70) * 300
    got = run(backend(SMOL), SMOL, qkv, make_pool(SMOL, torch.float32), batch)
    expected = run(ReferenceAttention(9, 3, 64), SMOL, qkv, make_pool(SMOL, torch.float32), batch)
    torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-1)


def test_without_kernels_the_reference_backend_is_used_and_the_reason_logged(monkeypatch, caplog):
    monkeypatch.setenv("KVRELAY_CPU_KERNEL", "off")
    native_status.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert cpu_attention(9, 3, 64).name == "reference"
        assert "off by KVRELAY_CPU_KERNEL" in caplog.text
    finally:
        native_status.cache_clear()


def test_a_head_size_the_kernel_does_not_take_falls_back(caplog):
    with caplog.at_level(logging.WARNING):
        assert cpu_attention(4, 2, 72).name == "reference"
