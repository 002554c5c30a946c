"""Rotary position embedding: the table of angles and the half rotation. Knows nothing of layers or caches."""

from __future__ import annotations

import math

import torch

from kvrelay.models.config import Llama3Rope, ModelConfig


def rope_table(config: ModelConfig, num_positions: int) -> torch.Tensor:
    """float32 [num_positions, head_dim]: cosines of the head_dim / 2 angles of a position, then their sines."""
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), inverse_frequencies(config))
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def inverse_frequencies(config: ModelConfig) -> torch.Tensor:
    """float32 [head_dim / 2]: radians per position of each pair, scaled if the model asks for it."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    return frequencies if config.rope_scaling is None else _llama3(frequencies, config.rope_scaling)


def _llama3(frequencies: torch.Tensor, scaling: Llama3Rope) -> torch.Tensor:
    """Long waves are divided by factor, short ones kept, those between blended (Llama 3.1)."""
    waves = 2 * math.pi / frequencies
    rotations = scaling.original_max_positions / waves
    blend = (rotations - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blended = (1 - blend) * frequencies / scaling.factor + blend * frequencies
    long, short = rotations < scaling.low_freq_factor, rotations > scaling.high_freq_factor
    return torch.where(long, frequencies / scaling.factor, torch.where(short, frequencies, blended))


def rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotate x [num_tokens, heads, head_dim] by the table rows `angles` [num_tokens, head_dim] of its positions."""
    cos, sin = angles.unsqueeze(1).chunk(2, dim=-1)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
