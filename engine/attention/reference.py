"""Attention by gather and softmax, one sequence at a time, in float32: the oracle the fast backends are held to."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.rope import rotate
from engine.tensors import StepBatch


@dataclass(frozen=True, slots=True)
class ReferenceAttention:
    """Implements engine.attention.base.AttentionBackend in plain torch, on any device."""

    heads: int
    kv_heads: int
    head_dim: int

    @property
    def name(self) -> str:
        return "reference"

    def forward(
        self,
        layer: int,
        qkv: torch.Tensor,
        pool: torch.Tensor,
        batch: StepBatch,
        rope: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """See AttentionBackend.forward."""
        parts = qkv.view(-1, self.heads + 2 * self.kv_heads, self.head_dim)
        angles = rope[batch.positions.long()]
        q_and_k = rotate(parts[:, : self.heads + self.kv_heads].float(), angles)
        q, k, v = q_and_k[:, : self.heads], q_and_k[:, self.heads :], parts[:, self.heads + self.kv_heads :]
        keys, values = pool[:, :, layer, 0], pool[:, :, layer, 1]  # each [num_blocks, kv_heads, block_size, head_dim]
        blocks, offsets = batch.slot_blocks.long(), batch.slot_offsets.long()
        keys[blocks, :, offsets] = k.to(pool.dtype)
        values[blocks, :, offsets] = v.to(pool.dtype)
        starts = batch.cu_seqlens_q.tolist()
        for i, context in enumerate(batch.context_lens.tolist()):
            rows = slice(starts[i], starts[i + 1])
            table = batch.block_tables[i].long()
            attended = self._attend(q[rows], _gather(keys, table, context), _gather(values, table, context))
            out[rows] = attended.flatten(1).to(out.dtype)

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q [q_len, heads, head_dim], k and v [kv_heads, context, head_dim] -> [q_len, heads, head_dim]."""
        q_len, context = q.shape[0], k.shape[1]
        grouped = q.view(q_len, self.kv_heads, self.heads // self.kv_heads, self.head_dim)
        scores = torch.einsum("qkgd,kcd->kgqc", grouped, k) * self.head_dim**-0.5
        hidden = torch.ones(q_len, context, dtype=torch.bool, device=q.device).triu(context - q_len + 1)
        weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
        return torch.einsum("kgqc,kcd->qkgd", weights, v).reshape(q_len, self.heads, self.head_dim)


def _gather(paged: torch.Tensor, table: torch.Tensor, context: int) -> torch.Tensor:
    """[num_blocks, kv_heads, block_size, head_dim] -> float32 [kv_heads, context, head_dim] in logical order."""
    num_blocks = -(-context // paged.shape[2])
    return paged[table[:num_blocks]].transpose(0, 1).flatten(1, 2)[:, :context].float()
