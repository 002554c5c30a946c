"""A random Llama of a few layers as a real Hugging Face directory: the model of tests that need no download."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine.llama import expected_tensors
from kvrelay.models.config import ModelConfig

BOS, EOS = 256, 257
CHAT_TEMPLATE = (
    "{% for message in messages %}<|bos|>{{ message['role'] }}\n{{ message['content'] }}<|eos|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|bos|>assistant\n{% endif %}"
)


@dataclass(frozen=True, slots=True)
class TinyShape:
    """What may be varied; the rest is fixed. Every token id below 258 decodes to a byte, BOS or EOS."""

    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    mlp: int = 128
    vocab: int = 320
    max_positions: int = 2048
    tied: bool = False
    bias: bool = False
    shards: int = 1
    rope_scaling: dict[str, Any] | None = None


def random_llama(directory: Path, seed: int = 0, shape: TinyShape | None = None) -> Path:
    """Write the model (float32 weights) and its byte-level tokenizer into `directory`, made if absent; return it."""
    shape = shape or TinyShape()
    directory.mkdir(parents=True, exist_ok=True)
    _write_json(directory / "config.json", _config(shape))
    _write_json(directory / "generation_config.json", {"bos_token_id": BOS, "eos_token_id": [EOS]})
    _write_tokenizer(directory)
    save_file({"placeholder": torch.zeros(1)}, directory / "model.safetensors")  # from_dir wants weights
    names = expected_tensors(ModelConfig.from_dir(directory))
    (directory / "model.safetensors").unlink()
    generator = torch.Generator().manual_seed(seed)
    _write_weights(directory, {n: _random(n, s, generator) for n, s in names.items()}, shape.shards)
    return directory


def _config(shape: TinyShape) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": shape.heads * shape.head_dim,
        "intermediate_size": shape.mlp,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_positions,
        "rope_theta": 10000.0,
        "rope_scaling": shape.rope_scaling,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": shape.tied,
        "attention_bias": shape.bias,
        "mlp_bias": shape.bias,
        "vocab_size": shape.vocab,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "torch_dtype": "float32",
    }


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Wide enough that the two best logits are rarely close, and that every token changes what follows."""
    values = torch.randn(shape, generator=generator)
    if "norm" in name:
        return 1.0 + 0.1 * values
    if name.endswith("bias"):
        return 0.1 * values
    return values if "embed" in name else values * (1.5 * shape[1] ** -0.5)


def _write_weights(directory: Path, tensors: dict[str, torch.Tensor], shards: int) -> None:
    if shards == 1:
        save_file(tensors, directory / "model.safetensors")
        return
    weight_map = {name: f"model-{i % shards + 1:05d}-of-{shards:05d}.safetensors" for i, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        save_file({n: t for n, t in tensors.items() if weight_map[n] == file}, directory / file)
    _write_json(directory / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


def _write_tokenizer(directory: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|bos|>", special=True), AddedToken("<|eos|>", special=True)])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "chat_template": CHAT_TEMPLATE}
    _write_json(directory / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **settings})


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")
