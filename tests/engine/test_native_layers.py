"""The fused layers against the same layers call by call: the same bits in activations and pool."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from engine.attention.cpu import CpuAttention
from engine.attention.reference import ReferenceAttention
from engine.linear import NativeLinear, TorchLinear
from engine.native import NativeUnavailable, load, ops
from engine.native.layers import fused_layers
from engine.tensors import StepBatch

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, MLP, LAYERS, BLOCK_SIZE = 6, 2, 32, 96, 160, 3, 16
EPS = 1e-5


@dataclass(frozen=True)
class Layer:
    input_norm: Tensor
    qkv: NativeLinear
    output: NativeLinear
    mlp_norm: Tensor
    gate_up: NativeLinear
    down: NativeLinear


@pytest.fixture
def native():
    try:
        return load()
    except NativeUnavailable as error:
        pytest.skip(str(error))


def make_layers(native, dtype: torch.dtype, threads: int) -> list[Layer]:
    generator = torch.Generator().manual_seed(4)

    def linear(n: int, k: int, bias: bool = False) -> NativeLinear:
        weight = (torch.randn(n, k, generator=generator) / k**0.5).to(dtype)
        return NativeLinear(native, weight, torch.randn(n, generator=generator) if bias else None, threads)

    def norm() -> Tensor:
        return torch.rand(HIDDEN, generator=generator) + 0.5

    return [
        Layer(
            norm(),
            linear((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN, bias=True),
            linear(HIDDEN, HEADS * HEAD_DIM),
            norm(),
            linear(2 * MLP, HIDDEN),
            linear(HIDDEN, MLP),
        )
        for _ in range(LAYERS)
    ]


def make_batch() -> StepBatch:
    """Two decoding sequences and a chunk, each on blocks of its own."""
    spans, tables = [(20, 1), (0, 1), (30, 40)], [[1, 2, 0, 0, 0], [3, 0, 0, 0, 0], [9, 4, 8, 5, 7]]
    positions = [p for start, rows in spans for p in range(start, start + rows)]
    owners = [i for i, (_, rows) in enumerate(spans) for _ in range(rows)]

    def int32(values) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    return StepBatch(
        token_ids=torch.zeros(len(positions), dtype=torch.int64),
        positions=int32(positions),
        slot_blocks=int32([tables[i][p // BLOCK_SIZE] for i, p in zip(owners, positions, strict=True)]),
        slot_offsets=int32([p % BLOCK_SIZE for p in positions]),
        cu_seqlens_q=int32([0, 1, 2, 42]),
        context_lens=int32([21, 1, 70]),
        block_tables=int32(tables),
        sample_rows=torch.tensor([0, 1, 41]),
    )


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_call_gives_the_bits_of_many(native, dtype, threads):
    layers, batch = make_layers(native, dtype, threads), make_batch()
    rope = torch.rand(128, HEAD_DIM)
    pool = torch.randn(10, KV_HEADS, LAYERS, 2, BLOCK_SIZE, HEAD_DIM).to(dtype)
    residual = torch.randn(42, HIDDEN)
    attention = CpuAttention(native, HEADS, KV_HEADS, HEAD_DIM, threads=threads)
    expected_pool, expected_residual, out = pool.clone(), residual.clone(), torch.empty(42, HEADS * HEAD_DIM)
    expected = first = ops.rms_norm(residual, layers[0].input_norm, EPS)
    for i, layer in enumerate(layers[:-1]):
        attention.forward(i, layer.qkv(expected), expected_pool, batch, rope, out)
        expected = ops.add_rms_norm(layer.output(out), expected_residual, layer.mlp_norm, EPS)
        expected = layer.down(ops.silu_mul(layer.gate_up(expected)))
        expected = ops.add_rms_norm(expected, expected_residual, layers[i + 1].input_norm, EPS)

    fused = fused_layers(layers, attention, EPS)
    assert fused is not None
    assert fused.count == LAYERS - 1
    x = first.clone()
    fused.forward(x, residual, pool, batch, rope)
    assert torch.equal(x, expected)
    assert torch.equal(residual, expected_residual)
    assert torch.equal(pool, expected_pool)


def test_layers_that_are_not_all_native_are_not_fused(native):
    layers = make_layers(native, torch.float32, 1)
    attention = CpuAttention(native, HEADS, KV_HEADS, HEAD_DIM, threads=1)
    assert fused_layers(layers[:1], attention, EPS) is None
    assert fused_layers(layers, ReferenceAttention(HEADS, KV_HEADS, HEAD_DIM), EPS) is None
    plain = TorchLinear(torch.zeros(HIDDEN, MLP), None)
    odd = Layer(layers[0].input_norm, layers[0].qkv, layers[0].output, layers[0].mlp_norm, layers[0].gate_up, plain)
    assert fused_layers([odd, *layers], attention, EPS) is None
