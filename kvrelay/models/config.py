"""What a Hugging Face model directory says about its model, checked. Knows neither tensors nor the engine.

Reads Llama 2 and 3, SmolLM2, TinyLlama (LlamaForCausalLM). Every failure is NotFound, InvalidArgument or
Unimplemented, with field `model` and a message that names the file and the entry in it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from kvrelay.errors import InvalidArgument, NotFound, Unimplemented
from kvrelay.models.safetensors_files import read_json, read_tensors, weight_files

CONFIG = "config.json"
SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM",)


@dataclass(frozen=True, slots=True)
class Llama3Rope:
    """Rope scaling of type llama3: low frequencies are divided by factor, those in between blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only model's shape. Counts and sizes in elements; eos_ids may be empty."""

    architecture: str
    num_layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int
    max_positions: int
    rope_theta: float
    rope_scaling: Llama3Rope | None
    rms_eps: float
    tie_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    eos_ids: tuple[int, ...]

    @classmethod
    def from_dir(cls, path: str | Path, *, weights: bool = True) -> ModelConfig:
        """The config of a complete model directory; the weights' headers are checked too, not their contents.

        weights False: what config.json says is enough, as for planning.
        """
        directory = Path(path)
        if not directory.is_dir():
            raise NotFound(f"{directory}: no such model directory", field="model")
        fields = _Fields(read_json(directory / CONFIG), directory / CONFIG)
        architecture = _architecture(fields)
        if weights:
            read_tensors(directory)
        hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
        config = cls(
            architecture=architecture,
            num_layers=fields.integer("num_hidden_layers"),
            hidden=hidden,
            heads=heads,
            kv_heads=fields.integer("num_key_value_heads", heads),
            head_dim=fields.integer("head_dim", hidden // heads),
            mlp=fields.integer("intermediate_size"),
            vocab=fields.integer("vocab_size"),
            max_positions=fields.integer("max_position_embeddings", 2048),
            rope_theta=_rope_theta(fields),
            rope_scaling=_rope_scaling(fields),
            rms_eps=fields.number("rms_norm_eps", 1e-6),
            tie_embeddings=fields.flag("tie_word_embeddings"),
            attention_bias=fields.flag("attention_bias"),
            mlp_bias=fields.flag("mlp_bias"),
            eos_ids=_eos_ids(directory, fields),
        )
        _check_consistent(config, fields)
        return config


def fingerprint(path: str | Path) -> str:
    """Hash of what decides a model's KV: its shape and the contents of its weights. Not of dtype, EOS or tokenizer.

    Reads every weight file once (memory-mapped, all cores). Two directories with one fingerprint may exchange blocks.
    """
    directory = Path(path)
    shape = asdict(ModelConfig.from_dir(directory))
    del shape["eos_ids"]
    total = blake3(json.dumps(shape, sort_keys=True).encode())
    for file in weight_files(directory):
        total.update(blake3(max_threads=blake3.AUTO).update_mmap(file).digest())
    return total.hexdigest()[:32]


def tokenizer_hash(path: str | Path) -> str:
    """Hash of tokenizer.json: two processes with one hash turn a text into the same tokens."""
    file = Path(path) / "tokenizer.json"
    try:
        return blake3(file.read_bytes()).hexdigest()[:32]
    except OSError:
        raise NotFound(f"{file}: no such file", field="model") from None


class _Fields:
    """Typed reads from a JSON object; errors name the file and the entry."""

    def __init__(self, raw: Mapping[str, Any], where: Path | str) -> None:
        self.raw = raw
        self.where = where

    def wrong(self, name: str, must: str) -> InvalidArgument:
        return InvalidArgument(f"{self.where}: {name} must be {must}, not {self.raw.get(name)!r}", field="model")

    def integer(self, name: str, default: int | None = None) -> int:
        """A positive integer; absent or null means the default."""
        value = self.raw.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise self.wrong(name, "a positive integer")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A positive finite number; absent or null means the default."""
        value = self.raw.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self.wrong(name, "a positive number")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self.raw.get(name)
        if value not in (None, True, False):
            raise self.wrong(name, "true or false")
        return bool(value)

    def section(self, name: str) -> _Fields | None:
        value = self.raw.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(name, "an object")
        return _Fields(value, f"{self.where}: {name}")


def _architecture(fields: _Fields) -> str:
    names = fields.raw.get("architectures")
    if not isinstance(names, list) or len(names) != 1:
        raise fields.wrong("architectures", "a list of one name")
    name = str(names[0])
    if name not in SUPPORTED_ARCHITECTURES:
        known = ", ".join(SUPPORTED_ARCHITECTURES)
        raise InvalidArgument(
            f"{fields.where}: architecture {name} is not supported; supported: {known}", field="model"
        )
    if fields.raw.get("quantization_config"):
        raise Unimplemented(f"{fields.where}: quantization_config: quantized weights are not built yet", field="model")
    if fields.raw.get("hidden_act", "silu") != "silu":
        raise Unimplemented(f"{fields.where}: hidden_act {fields.raw['hidden_act']!r} is not built yet", field="model")
    return name


def _rope_theta(fields: _Fields) -> float:
    """Newer configs keep it inside rope_parameters, older ones at the top."""
    parameters = fields.section("rope_parameters")
    if parameters is not None and "rope_theta" in parameters.raw:
        return parameters.number("rope_theta")
    return fields.number("rope_theta", 10_000.0)


def _rope_scaling(fields: _Fields) -> Llama3Rope | None:
    section = fields.section("rope_parameters") or fields.section("rope_scaling")
    if section is None:
        return None
    kind = section.raw.get("rope_type", section.raw.get("type", "default"))
    if section.raw.get("partial_rotary_factor", 1.0) != 1.0:
        raise Unimplemented(f"{section.where}: partial_rotary_factor is not built yet", field="model")
    if kind == "default":
        return None
    if kind != "llama3":
        raise Unimplemented(f"{section.where}: rope scaling of type {kind!r} is not built yet", field="model")
    return Llama3Rope(
        factor=section.number("factor"),
        low_freq_factor=section.number("low_freq_factor"),
        high_freq_factor=section.number("high_freq_factor"),
        original_max_positions=section.integer("original_max_position_embeddings"),
    )


def _eos_ids(directory: Path, fields: _Fields) -> tuple[int, ...]:
    """generation_config.json wins over config.json: instruct models end turns with ids that only it lists."""
    sources = [fields]
    generation = directory / "generation_config.json"
    if generation.exists():
        sources.insert(0, _Fields(read_json(generation), generation))
    for source in sources:
        value = source.raw.get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise source.wrong("eos_token_id", "a token id or a list of them")
        return tuple(ids)
    return ()


def _check_consistent(config: ModelConfig, fields: _Fields) -> None:
    if config.heads % config.kv_heads:
        raise fields.wrong("num_key_value_heads", f"a divisor of num_attention_heads {config.heads}")
    if config.head_dim % 2:
        raise fields.wrong("head_dim", "even")
    if any(i >= config.vocab for i in config.eos_ids):
        raise InvalidArgument(
            f"{fields.where}: eos_token_id {list(config.eos_ids)} reaches past vocab_size {config.vocab}", field="model"
        )
