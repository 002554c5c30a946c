"""The Llama architecture over a flat batch and a paged pool. Knows neither scheduling, kernels nor files' formats.

1. Embeddings of all rows of the step, one matrix [num_tokens, hidden].
2. Layers: every weight sees that one matrix; attention alone sees sequences, through the batch's tables.
3. Final norm and logits of the rows that sample, nothing else.

Another architecture is another file with a class of the same `forward`, and its own tensor names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from engine.attention.base import AttentionBackend
from engine.native import ops
from engine.native.layers import fused_layers
from engine.tensors import StepBatch
from engine.weights import Checkpoint
from kvrelay.models.config import ModelConfig

Linear = Callable[[torch.Tensor], torch.Tensor]
"""[rows, in] -> [rows, out]"""


class LinearFactory(Protocol):
    """Makes a callable out of a weight [out, in] and a bias [out]; may keep its own packed copy and drop ours."""

    def __call__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear: ...


@runtime_checkable
class RowReader(Protocol):
    """A linear layer that can give back rows of its weight: a tied embedding then needs no copy of its own."""

    def rows(self, ids: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Backends:
    """What a model computes with: the ports, the dtype activations have between them, threads of the small ops.

    head makes the logits, which want float32 where `linear` rounds its results: two that tie may not be ranked.
    """

    attention: AttentionBackend
    linear: LinearFactory
    head: LinearFactory
    activation_dtype: torch.dtype
    threads: int


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer. qkv yields q, k and v heads side by side, gate_up both halves of the MLP."""

    input_norm: torch.Tensor
    qkv: Linear
    output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor a checkpoint must have."""
    hidden, mlp = config.hidden, config.mlp
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    matrices = {
        "self_attn.q_proj": (q, hidden, config.attention_bias),
        "self_attn.k_proj": (kv, hidden, config.attention_bias),
        "self_attn.v_proj": (kv, hidden, config.attention_bias),
        "self_attn.o_proj": (hidden, q, config.attention_bias),
        "mlp.gate_proj": (mlp, hidden, config.mlp_bias),
        "mlp.up_proj": (mlp, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, mlp, config.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab, hidden)}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        for name, (rows, columns, bias) in matrices.items():
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
        shapes[f"{prefix}input_layernorm.weight"] = shapes[f"{prefix}post_attention_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab, hidden)
    return shapes


class LlamaModel:
    """Weights of a Llama and the pass over them. Writes KV into the pool it is given, owns none."""

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, backends: Backends, rope: torch.Tensor) -> None:
        """rope covers every position that will be asked for; the checkpoint may be closed afterwards."""
        checkpoint.check(expected_tensors(config))
        self._config = config
        self._backends = backends
        self._rope = rope
        self._layers = [_load_layer(config, checkpoint, backends, i) for i in range(config.num_layers)]
        self._norm = checkpoint.tensor("model.norm.weight", torch.float32)
        self._embed, self._head = _load_ends(config, checkpoint, backends)
        self._fused = fused_layers(self._layers, backends.attention, config.rms_eps)

    def forward(self, batch: StepBatch, pool: torch.Tensor) -> torch.Tensor:
        """float32 logits [num_samples, vocab]; the KV of every row is in the pool afterwards.

        pool is [num_blocks, kv_heads, layers, 2, block_size, head_dim].
        """
        eps, threads, rows = self._config.rms_eps, self._backends.threads, batch.sample_rows
        residual = self._embed(batch.token_ids).to(self._backends.activation_dtype)
        attended = residual.new_empty(residual.shape[0], self._config.heads * self._config.head_dim)
        x = ops.rms_norm(residual, self._layers[0].input_norm, eps, threads=threads)
        first = 0
        if self._fused is not None:
            self._fused.forward(x, residual, pool, batch, self._rope)
            first = self._fused.count
        for i, layer in enumerate(self._layers[first:], first):
            self._backends.attention.forward(i, layer.qkv(x), pool, batch, self._rope, attended)
            if i + 1 == len(self._layers) and len(rows) < batch.num_tokens:
                # All KV is written: from here on only rows that sample matter.
                if not len(rows):
                    return torch.empty(0, self._config.vocab)
                attended, residual = attended[rows], residual[rows]
            x = ops.add_rms_norm(layer.output(attended), residual, layer.mlp_norm, eps, threads=threads)
            x = layer.down(ops.silu_mul(layer.gate_up(x), threads=threads))
            x = ops.add_rms_norm(x, residual, self._following_norm(i), eps, threads=threads)
        return self._head(x).float()

    def _following_norm(self, index: int) -> torch.Tensor:
        """The norm that stands after a layer: the next layer's first, or the model's last."""
        return self._layers[index + 1].input_norm if index + 1 < len(self._layers) else self._norm


def _load_ends(config: ModelConfig, checkpoint: Checkpoint, backends: Backends) -> tuple[Linear, Linear]:
    """Token ids [rows] -> embeddings [rows, hidden], and the head; one copy of a tied matrix where possible."""
    table = checkpoint.tensor("model.embed_tokens.weight")
    head = backends.head(table if config.tie_embeddings else checkpoint.tensor("lm_head.weight"), None)
    if config.tie_embeddings and isinstance(head, RowReader):
        return head.rows, head
    return lambda ids: ops.embedding(ids, table, backends.activation_dtype), head


def _load_layer(config: ModelConfig, checkpoint: Checkpoint, backends: Backends, index: int) -> Layer:
    prefix = f"model.layers.{index}."

    def linear(names: list[str], bias: bool) -> Linear:
        weight = checkpoint.stacked([f"{prefix}{name}.weight" for name in names])
        rows = checkpoint.stacked([f"{prefix}{name}.bias" for name in names]) if bias else None
        return backends.linear(weight, rows)

    attention, mlp = config.attention_bias, config.mlp_bias
    return Layer(
        input_norm=checkpoint.tensor(f"{prefix}input_layernorm.weight", torch.float32),
        qkv=linear(["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], attention),
        output=linear(["self_attn.o_proj"], attention),
        mlp_norm=checkpoint.tensor(f"{prefix}post_attention_layernorm.weight", torch.float32),
        gate_up=linear(["mlp.gate_proj", "mlp.up_proj"], mlp),
        down=linear(["mlp.down_proj"], mlp),
    )
