"""Attention on CPUs by the native paged kernel. Knows the C structure it fills, not the arithmetic (attention.h).

A query row gives the same bits decoded alone or inside any chunk, whatever the batch, threads or block size.
"""

from __future__ import annotations

import ctypes
import logging

import torch

from engine.attention.base import AttentionBackend
from engine.attention.reference import ReferenceAttention
from engine.native import Native, native, native_status
from engine.tensors import StepBatch

_log = logging.getLogger(__name__)
_IS_BF16 = {torch.float32: 0, torch.bfloat16: 1}
_UNIT, _MAX_HEAD_DIM = 16, 256  # as in simd.h and attention.h
_POINTERS = (
    *("qkv", "pool", "rope", "out"),
    *("positions", "slot_blocks", "slot_offsets", "cu_seqlens_q", "context_lens", "block_tables"),
)
_COUNTS = (
    *("tokens", "seqs", "max_blocks", "heads", "kv_heads", "head_dim", "layers", "layer", "block_size"),
    *("qkv_stride", "out_stride", "act_is_bf16", "pool_is_bf16", "threads"),
)


class _Arguments(ctypes.Structure):
    """KvrAttention of attention.h."""

    _fields_ = [*((name, ctypes.c_void_p) for name in _POINTERS), *((name, ctypes.c_int64) for name in _COUNTS)]


def cpu_attention(heads: int, kv_heads: int, head_dim: int, *, threads: int = 1) -> AttentionBackend:
    """The native backend, or the reference one with a warning that says why."""
    kernels = native()
    if kernels is None:
        reason = native_status().detail
    elif head_dim % _UNIT or head_dim > _MAX_HEAD_DIM:
        reason = f"head_dim {head_dim} is not a multiple of {_UNIT} up to {_MAX_HEAD_DIM}"
    else:
        return CpuAttention(kernels, heads, kv_heads, head_dim, threads=threads)
    _log.warning("attention falls back to the reference backend: %s", reason)
    return ReferenceAttention(heads, kv_heads, head_dim)


class CpuAttention:
    """Implements engine.attention.base.AttentionBackend. One owner thread: the C arguments are reused."""

    def __init__(self, kernels: Native, heads: int, kv_heads: int, head_dim: int, *, threads: int) -> None:
        self.kernels = kernels
        self.heads, self.kv_heads, self.head_dim, self.threads = heads, kv_heads, head_dim, threads
        self._attention = kernels.attention
        self._name = f"cpu ({kernels.instruction_set})"
        self._batch: StepBatch | None = None
        self._pool: torch.Tensor | None = None
        self._arguments = a = _Arguments()
        self._at = ctypes.addressof(a)
        a.heads, a.kv_heads, a.head_dim, a.threads = heads, kv_heads, head_dim, threads
        a.out_stride, a.qkv_stride = heads * head_dim, (heads + 2 * kv_heads) * head_dim

    @property
    def name(self) -> str:
        return self._name

    def forward(
        self,
        layer: int,
        qkv: torch.Tensor,
        pool: torch.Tensor,
        batch: StepBatch,
        rope: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """See AttentionBackend.forward. All tensors contiguous."""
        is_bf16 = _IS_BF16[qkv.dtype]
        failed = self._attention(self.arguments(layer, qkv.data_ptr(), is_bf16, pool, batch, rope, out.data_ptr()))
        if failed:
            raise MemoryError("the attention kernel could not list its tasks")

    def arguments(
        self,
        layer: int,
        qkv_at: int,
        is_bf16: int,
        pool: torch.Tensor,
        batch: StepBatch,
        rope: torch.Tensor,
        out_at: int,
    ) -> int:
        """Address of the filled C structure: good until the next call, while batch, pool and rope live."""
        if batch is not self._batch or pool is not self._pool:
            self._take_step(batch, pool)
        a = self._arguments
        a.layer, a.act_is_bf16, a.qkv, a.rope, a.out = layer, is_bf16, qkv_at, rope.data_ptr(), out_at
        return self._at

    def _take_step(self, batch: StepBatch, pool: torch.Tensor) -> None:
        """What is the same for every layer of a step. The batch is kept, so its addresses stay good."""
        a, blocks = self._arguments, pool.shape
        assert pool.is_contiguous()
        assert blocks[1] == a.kv_heads
        assert blocks[5] == a.head_dim
        a.layers, a.block_size = blocks[2], blocks[4]
        a.pool, a.pool_is_bf16 = pool.data_ptr(), _IS_BF16[pool.dtype]
        a.tokens, a.seqs, a.max_blocks = batch.num_tokens, *batch.block_tables.shape
        for name in ("positions", "slot_blocks", "slot_offsets", "cu_seqlens_q", "context_lens", "block_tables"):
            tensor = getattr(batch, name)
            assert tensor.dtype is torch.int32
            assert tensor.is_contiguous()
            setattr(a, name, tensor.data_ptr())
        self._batch, self._pool = batch, pool
