"""Shapes of well-known models, to plan with before their weights are there. Knows no files."""

from __future__ import annotations

from dataclasses import replace

from kvrelay.models.config import ModelConfig

_LLAMA_3_8B = ModelConfig(
    architecture="LlamaForCausalLM",
    num_layers=32,
    hidden=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    mlp=14336,
    vocab=128256,
    max_positions=8192,
    rope_theta=500_000.0,
    rope_scaling=None,
    rms_eps=1e-5,
    tie_embeddings=False,
    attention_bias=False,
    mlp_bias=False,
    eos_ids=(128001, 128009),
)
PRESETS: dict[str, ModelConfig] = {
    "llama-3-8b": _LLAMA_3_8B,
    "llama-3-70b": replace(_LLAMA_3_8B, num_layers=80, hidden=8192, heads=64, mlp=28672),
}
