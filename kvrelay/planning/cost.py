"""A model in bytes and operations, and the bound of a decode step on a machine. Pure; knows no pool and no load."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.blocks import DTYPE_BYTES
from kvrelay.models.config import ModelConfig
from kvrelay.planning.given import Machine
from kvrelay.sizing import PromptCost, decode_step, prompt_cost


@dataclass(frozen=True, slots=True)
class ModelCost:
    """A model in bytes and operations. layer_params: of all layers' matrices; width: heads x head size."""

    num_params: int
    layer_params: int
    head_params: int
    num_layers: int
    width: int
    weight_bytes: int
    token_bytes: int
    max_positions: int

    def prompt(self, num_tokens: int, past_tokens: int = 0) -> PromptCost:
        return prompt_cost(
            num_tokens, past_tokens, layer_params=self.layer_params, num_layers=self.num_layers, width=self.width
        )

    def decode_flops(self, num_sequences: int, context_tokens: float) -> float:
        """One token for each sequence: its matrices, its logits, its look back at context_tokens."""
        matrices = 2 * (self.layer_params + self.head_params)
        return num_sequences * (matrices + 4 * self.width * self.num_layers * context_tokens)


def model_cost(config: ModelConfig, dtype: str) -> ModelCost:
    """Weights and KV both in `dtype`."""
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    attention = config.hidden * (2 * queries + 2 * keys)
    matrices = attention + 3 * config.hidden * config.mlp
    biases = config.attention_bias * (queries + 2 * keys + config.hidden)
    biases += config.mlp_bias * (2 * config.mlp + config.hidden)
    head = config.vocab * config.hidden
    embeddings = head if config.tie_embeddings else 2 * head
    num_params = config.num_layers * (matrices + biases + 2 * config.hidden) + config.hidden + embeddings
    return ModelCost(
        num_params=num_params,
        layer_params=config.num_layers * matrices,
        head_params=head,
        num_layers=config.num_layers,
        width=queries,
        weight_bytes=num_params * DTYPE_BYTES[dtype],
        token_bytes=2 * config.num_layers * keys * DTYPE_BYTES[dtype],
        max_positions=config.max_positions,
    )


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """The bound of one step: the longer of reading and computing. bound_by: memory or compute."""

    num_sequences: int
    bytes_read: int
    read_s: float
    compute_s: float

    @property
    def seconds(self) -> float:
        return max(self.read_s, self.compute_s)

    @property
    def bound_by(self) -> str:
        return "memory" if self.read_s >= self.compute_s else "compute"

    @property
    def tokens_per_s(self) -> float:
        return self.num_sequences / self.seconds


def plan_step(cost: ModelCost, machine: Machine, num_sequences: int, context_tokens: float) -> DecodeStep:
    """One token for each of num_sequences."""
    read = decode_step(
        num_sequences,
        round(context_tokens),
        weight_bytes=cost.weight_bytes,
        token_bytes=cost.token_bytes,
        bytes_per_s=machine.bytes_per_s,
    )
    compute_s = cost.decode_flops(num_sequences, context_tokens) / machine.flops_per_s
    return DecodeStep(num_sequences, read.bytes_read, read.seconds, compute_s)
