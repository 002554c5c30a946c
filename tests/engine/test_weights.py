"""Tensors out of safetensors files, and the names of what is wrong with them."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_llama import TinyShape, random_llama

from engine.llama import expected_tensors
from engine.weights import Checkpoint
from kvrelay.errors import InvalidArgument, KVRelayError, Unimplemented
from kvrelay.models.config import ModelConfig

Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize("shards", [1, 3])
def test_matrices_of_any_file_are_stacked(tmp_path: Path, shards: int) -> None:
    random_llama(tmp_path, shape=TinyShape(shards=shards))
    plain = {}
    for file in tmp_path.glob("*.safetensors"):
        plain.update(load_file(file))
    names = [f"model.layers.0.self_attn.{n}_proj.weight" for n in "qkv"]
    with Checkpoint(tmp_path, torch.float32) as checkpoint:
        stacked = checkpoint.stacked(names)
    assert torch.equal(stacked, torch.cat([plain[name] for name in names]))


def test_tensors_come_in_the_dtype_asked_for(tmp_path: Path) -> None:
    random_llama(tmp_path)
    plain = load_file(tmp_path / "model.safetensors")
    with Checkpoint(tmp_path, torch.bfloat16) as checkpoint:
        assert torch.equal(checkpoint.tensor(Q), plain[Q].bfloat16())
        assert torch.equal(checkpoint.tensor(Q, torch.float32), plain[Q])


@pytest.mark.parametrize("shape", [TinyShape(tied=True), TinyShape(bias=True), TinyShape(layers=3, kv_heads=1)])
def test_a_complete_checkpoint_passes(tmp_path: Path, shape: TinyShape) -> None:
    config = ModelConfig.from_dir(random_llama(tmp_path, shape=shape))
    with Checkpoint(tmp_path, torch.float32) as checkpoint:
        checkpoint.check(expected_tensors(config))


@pytest.mark.parametrize(
    ("replacement", "error", "message"),
    [
        (None, InvalidArgument, f"tensor {Q} is missing"),
        (torch.zeros(64, 32), InvalidArgument, rf"{Q} has shape \[64, 32\], config.json asks for \[64, 64\]"),
        (torch.zeros(64, 64, dtype=torch.int8), Unimplemented, f"tensor {Q} of dtype I8"),
    ],
)
def test_a_wrong_tensor_is_named(
    tmp_path: Path, replacement: torch.Tensor | None, error: type[KVRelayError], message: str
) -> None:
    config = ModelConfig.from_dir(random_llama(tmp_path))
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[Q]
    if replacement is not None:
        tensors[Q] = replacement
    save_file(tensors, tmp_path / "model.safetensors")
    with Checkpoint(tmp_path, torch.float32) as checkpoint, pytest.raises(error, match=message):
        checkpoint.check(expected_tensors(config))
