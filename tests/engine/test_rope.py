"""Angles of rotary embedding against transformers' own."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.tiny_llama import random_llama
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from engine.rope import rope_table, rotate
from kvrelay.models.config import Llama3Rope, ModelConfig


@pytest.fixture
def config(tmp_path: Path) -> ModelConfig:
    return ModelConfig.from_dir(random_llama(tmp_path))


def transformers_table(config: LlamaConfig, num_positions: int) -> torch.Tensor:
    positions = torch.arange(num_positions).unsqueeze(0)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
    half = cos.shape[-1] // 2
    return torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1)


def test_plain_angles_agree_with_transformers(config: ModelConfig) -> None:
    theirs = LlamaConfig(
        hidden_size=512, num_attention_heads=8, rope_parameters={"rope_type": "default", "rope_theta": 1e5}
    )
    ours = replace(config, head_dim=64, rope_theta=1e5)
    torch.testing.assert_close(rope_table(ours, 8192), transformers_table(theirs, 8192), rtol=0, atol=1e-6)


def test_llama_3_1_scaling_agrees_with_transformers(config: ModelConfig) -> None:
    parameters = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    theirs = LlamaConfig(
        hidden_size=1024, num_attention_heads=8, max_position_embeddings=131072, rope_parameters=parameters
    )
    ours = replace(config, head_dim=128, rope_theta=500000.0, rope_scaling=Llama3Rope(8.0, 1.0, 4.0, 8192))
    table = rope_table(ours, 20_000)
    torch.testing.assert_close(table, transformers_table(theirs, 20_000), rtol=0, atol=1e-6)
    assert not torch.equal(table, rope_table(replace(ours, rope_scaling=None), 20_000))


def test_rotation_turns_pairs_of_the_two_halves() -> None:
    angles = torch.tensor([[0.0, 1.0, 1.0, 0.0]])  # first pair by a quarter turn, second not at all
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    assert rotate(x, angles).tolist() == [[[-3.0, 2.0, 1.0, 4.0]]]
