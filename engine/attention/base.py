"""The port every attention backend implements. Knows shapes and conventions, no kernel."""

from __future__ import annotations

from typing import Protocol

import torch

from engine.tensors import StepBatch


class AttentionBackend(Protocol):
    """One layer's attention over a step: rotate q and k, write k and v into the pool, attend."""

    @property
    def name(self) -> str: ...

    def forward(
        self,
        layer: int,
        qkv: torch.Tensor,
        pool: torch.Tensor,
        batch: StepBatch,
        rope: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Fill `out` [num_tokens, heads * head_dim] (activation dtype) and this layer's slots of the batch.

        qkv [num_tokens, (heads + 2 * kv_heads) * head_dim], activation dtype, before rope: q heads, k heads, v heads.
        pool [num_blocks, kv_heads, layers, 2, block_size, head_dim], KV dtype; index 0 of the axis of 2 is K, 1 is V.
        rope float32 [positions, head_dim]: cos of the half rotation, then sin (see engine.rope); rotate_half
        convention: (a, b) -> (a cos - b sin, b cos + a sin) over the two halves of a head.
        Causal, aligned bottom-right: row r of q_len rows of a sequence sees context_len - (q_len - 1 - r) tokens.
        Scores are scaled by head_dim ** -0.5; products are accumulated in float32. qkv may be overwritten.
        Blocks outside the batch's tables are neither read nor written.
        """
        ...
