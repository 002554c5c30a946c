"""The Llama architecture over a flat batch and a paged pool. Knows neither scheduling, kernels nor files' formats.

1. Embeddings of all rows of the step, one matrix [num_tokens, hidden].
2. Layers: every weight sees that one matrix; attention alone sees sequences, through the batch's tables.
3. Final norm and logits of the rows that sample, nothing else.

Another architecture is another file with a class of the same `forward`, and its own tensor names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional

from engine.attention.base import AttentionBackend
from engine.tensors import StepBatch
from engine.weights import Checkpoint
from kvrelay.models.config import ModelConfig

Linear = Callable[[torch.Tensor], torch.Tensor]
"""[rows, in] -> [rows, out]"""


class LinearFactory(Protocol):
    """Makes a callable out of a weight [out, in] and a bias [out]; may keep its own packed copy and drop ours."""

    def __call__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear: ...


class Ops(Protocol):
    """The small operations between the matrices; a backend may fuse them."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor: ...

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Add x to residual in place, return the norm of the sum."""
        ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[rows, 2 * mlp] -> [rows, mlp]: silu of the first half times the second."""
        ...


class TorchOps:
    """Ops in plain torch: any device, any dtype."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return functional.rms_norm(x, weight.shape, weight, eps)

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return self.rms_norm(residual.add_(x), weight, eps)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate) * up


@dataclass(frozen=True, slots=True)
class Backends:
    """What a model computes with: the ports, and the dtype that activations have between them."""

    attention: AttentionBackend
    linear: LinearFactory
    ops: Ops
    activation_dtype: torch.dtype


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
        self._norm = _norm(checkpoint, "model.norm.weight", backends)
        self._embeddings = checkpoint.tensor("model.embed_tokens.weight")
        head = self._embeddings if config.tie_embeddings else checkpoint.tensor("lm_head.weight")
        self._head = backends.linear(head, None)

    def forward(self, batch: StepBatch, pool: torch.Tensor) -> torch.Tensor:
        """float32 logits [num_samples, vocab]; the KV of every row is in the pool afterwards.

        pool is [num_blocks, kv_heads, layers, 2, block_size, head_dim].
        """
        ops, eps, dtype = self._backends.ops, self._config.rms_eps, self._backends.activation_dtype
        residual = functional.embedding(batch.token_ids, self._embeddings).to(dtype)
        attended = residual.new_empty(residual.shape[0], self._config.heads * self._config.head_dim)
        x = ops.rms_norm(residual, self._layers[0].input_norm, eps)
        for i, layer in enumerate(self._layers):
            self._backends.attention.forward(i, layer.qkv(x), pool, batch, self._rope, attended)
            x = ops.add_rms_norm(layer.output(attended), residual, layer.mlp_norm, eps)
            x = layer.down(ops.silu_mul(layer.gate_up(x)))
            following = self._layers[i + 1].input_norm if i + 1 < len(self._layers) else None
            if following is not None:
                x = ops.add_rms_norm(x, residual, following, eps)
        return self._logits(x, residual, batch.sample_rows)

    def _logits(self, x: torch.Tensor, residual: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        if not rows.numel():
            return residual.new_empty(0, self._config.vocab, dtype=torch.float32)
        last = self._backends.ops.add_rms_norm(x[rows], residual[rows], self._norm, self._config.rms_eps)
        return self._head(last).float()


def _load_layer(config: ModelConfig, checkpoint: Checkpoint, backends: Backends, index: int) -> Layer:
    prefix = f"model.layers.{index}."

    def linear(names: list[str], bias: bool) -> Linear:
        weight = checkpoint.stacked([f"{prefix}{name}.weight" for name in names])
        rows = checkpoint.stacked([f"{prefix}{name}.bias" for name in names]) if bias else None
        return backends.linear(weight, rows)

    attention, mlp = config.attention_bias, config.mlp_bias
    return Layer(
        input_norm=_norm(checkpoint, f"{prefix}input_layernorm.weight", backends),
        qkv=linear(["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], attention),
        output=linear(["self_attn.o_proj"], attention),
        mlp_norm=_norm(checkpoint, f"{prefix}post_attention_layernorm.weight", backends),
        gate_up=linear(["mlp.gate_proj", "mlp.up_proj"], mlp),
        down=linear(["mlp.down_proj"], mlp),
    )


def _norm(checkpoint: Checkpoint, name: str, backends: Backends) -> torch.Tensor:
    return checkpoint.tensor(name).to(backends.activation_dtype)
