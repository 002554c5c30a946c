"""What a model directory says, and every way in which one is refused."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.tiny_llama import TinyShape, random_llama

from coordinator.model_facts import load_model
from kvrelay.config import CoordinatorConfig, WorkerConfig
from kvrelay.errors import InvalidArgument, KVRelayError, NotFound, Unimplemented
from kvrelay.models.config import Llama3Rope, ModelConfig, fingerprint, tokenizer_hash
from kvrelay.requests import Role
from worker.roles import identity_of


def edit(path: Path, **changes: Any) -> None:
    config = json.loads(path.read_text())
    config.update(changes)
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def change(**changes: Any) -> Callable[[Path], None]:
    return lambda directory: edit(directory / "config.json", **changes)


def truncate(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def test_a_config_is_read_field_by_field(tmp_path: Path) -> None:
    assert ModelConfig.from_dir(random_llama(tmp_path)) == ModelConfig(
        architecture="LlamaForCausalLM",
        num_layers=2,
        hidden=64,
        heads=4,
        kv_heads=2,
        head_dim=16,
        mlp=128,
        vocab=320,
        max_positions=2048,
        rope_theta=10000.0,
        rope_scaling=None,
        rms_eps=1e-5,
        tie_embeddings=False,
        attention_bias=False,
        mlp_bias=False,
        eos_ids=(257,),
    )


def test_absent_fields_have_the_defaults_of_old_llama_configs(tmp_path: Path) -> None:
    random_llama(tmp_path)
    change(num_key_value_heads=..., head_dim=..., rope_theta=..., tie_word_embeddings=..., attention_bias=...)(tmp_path)
    config = ModelConfig.from_dir(tmp_path)
    assert (config.kv_heads, config.head_dim, config.rope_theta) == (4, 16, 10000.0)
    assert (config.tie_embeddings, config.attention_bias) == (False, False)


@pytest.mark.parametrize("section", ["rope_scaling", "rope_parameters"])
def test_llama3_rope_scaling_is_read_from_old_and_new_configs(tmp_path: Path, section: str) -> None:
    random_llama(tmp_path)
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_theta": 500000.0,
    }
    change(**{section: scaling})(tmp_path)
    config = ModelConfig.from_dir(tmp_path)
    assert config.rope_scaling == Llama3Rope(8.0, 1.0, 4.0, 8192)
    assert config.rope_theta == (500000.0 if section == "rope_parameters" else 10000.0)


@pytest.mark.parametrize(
    ("generation", "config", "eos"),
    [([3, 4], 2, (3, 4)), (3, 2, (3,)), (None, 2, (2,)), (None, [5, 6], (5, 6)), (None, None, ())],
)
def test_eos_ids_come_from_generation_config_first(tmp_path: Path, generation: Any, config: Any, eos: Any) -> None:
    random_llama(tmp_path)
    edit(tmp_path / "generation_config.json", eos_token_id=generation)
    edit(tmp_path / "config.json", eos_token_id=config)
    assert ModelConfig.from_dir(tmp_path).eos_ids == eos


BAD_DIRECTORIES: list[tuple[Callable[[Path], object], type[KVRelayError], str]] = [
    (lambda d: (d / "config.json").unlink(), NotFound, "config.json: no such file"),
    (lambda d: (d / "config.json").write_text("{"), InvalidArgument, "config.json: not readable as JSON"),
    (lambda d: (d / "config.json").write_text("[]"), InvalidArgument, "config.json: must hold a JSON object"),
    (change(architectures=["MambaForCausalLM"]), InvalidArgument, "architecture MambaForCausalLM is not supported"),
    (change(architectures=None), InvalidArgument, "architectures must be a list of one name"),
    (change(hidden_size="64"), InvalidArgument, "config.json: hidden_size must be a positive integer, not '64'"),
    (change(num_hidden_layers=0), InvalidArgument, "num_hidden_layers must be a positive integer, not 0"),
    (change(intermediate_size=...), InvalidArgument, "intermediate_size must be a positive integer, not None"),
    (change(num_key_value_heads=3), InvalidArgument, "num_key_value_heads must be a divisor of num_attention_heads 4"),
    (change(head_dim=15), InvalidArgument, "head_dim must be even, not 15"),
    (change(rms_norm_eps=-1), InvalidArgument, "rms_norm_eps must be a positive number, not -1"),
    (change(tie_word_embeddings="yes"), InvalidArgument, "tie_word_embeddings must be true or false"),
    (change(rope_scaling={"type": "linear", "factor": 2}), Unimplemented, "rope scaling of type 'linear'"),
    (change(rope_scaling={"rope_type": "llama3"}), InvalidArgument, "rope_scaling: factor must be a positive number"),
    (change(hidden_act="gelu"), Unimplemented, "hidden_act 'gelu'"),
    (change(quantization_config={"bits": 4}), Unimplemented, "quantization_config"),
    (change(vocab_size=200), InvalidArgument, "eos_token_id [257] reaches past vocab_size 200"),
    (lambda d: (d / "model.safetensors").unlink(), NotFound, "no weights"),
    (lambda d: (d / "model.safetensors").rename(d / "pytorch_model.bin"), NotFound, "only safetensors weights"),
    (truncate, InvalidArgument, "model.safetensors: half downloaded"),
    (lambda d: (d / "model.safetensors").write_bytes(b"abc"), InvalidArgument, "model.safetensors: half downloaded"),
    (lambda d: (d / "model.safetensors").write_bytes(b"\x02" + b"\0" * 7 + b"[]"), InvalidArgument, "is damaged"),
]


@pytest.mark.parametrize(("damage", "error", "message"), BAD_DIRECTORIES, ids=[m for _, _, m in BAD_DIRECTORIES])
def test_a_bad_directory_is_refused_by_name(
    tmp_path: Path, damage: Callable[[Path], object], error: type[KVRelayError], message: str
) -> None:
    damage(random_llama(tmp_path))
    with pytest.raises(KVRelayError) as caught:
        ModelConfig.from_dir(tmp_path)
    assert type(caught.value) is error
    assert message in caught.value.message
    assert caught.value.field == "model"


def test_a_missing_directory_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no such model directory"):
        ModelConfig.from_dir(tmp_path / "nowhere")


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    random_llama(tmp_path, shape=TinyShape(shards=3))
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(NotFound, match=r"half downloaded, model-00002-of-00003.safetensors"):
        ModelConfig.from_dir(tmp_path)


def test_an_index_may_not_point_outside_its_directory(tmp_path: Path) -> None:
    random_llama(tmp_path, shape=TinyShape(shards=2))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../other.safetensors"}}))
    with pytest.raises(InvalidArgument, match="outside the directory"):
        ModelConfig.from_dir(tmp_path)


def test_the_fingerprint_follows_weights_and_shape_and_nothing_else(tmp_path: Path) -> None:
    first = fingerprint(random_llama(tmp_path / "a", seed=1))
    assert first == fingerprint(random_llama(tmp_path / "b", seed=1))
    assert first != fingerprint(random_llama(tmp_path / "c", seed=2))
    edit(tmp_path / "b" / "config.json", torch_dtype="bfloat16", eos_token_id=3)
    edit(tmp_path / "b" / "generation_config.json", eos_token_id=[3])
    assert first == fingerprint(tmp_path / "b")
    edit(tmp_path / "b" / "config.json", rope_theta=20000.0)
    assert first != fingerprint(tmp_path / "b")


def test_the_tokenizer_hash_follows_tokenizer_json(tmp_path: Path) -> None:
    first = tokenizer_hash(random_llama(tmp_path / "a"))
    assert first == tokenizer_hash(random_llama(tmp_path / "b", seed=2))
    (tmp_path / "b" / "tokenizer.json").write_text("{}")
    assert first != tokenizer_hash(tmp_path / "b")
    (tmp_path / "b" / "tokenizer.json").unlink()
    with pytest.raises(NotFound, match=r"tokenizer.json: no such file"):
        tokenizer_hash(tmp_path / "b")


def test_coordinator_and_worker_name_a_model_alike_and_another_tokenizer_makes_it_another(tmp_path: Path) -> None:
    """Texts become other tokens with it, and grammars allow others: nothing would fail, and all would be wrong."""
    here, there = random_llama(tmp_path / "a" / "m"), random_llama(tmp_path / "b" / "m")
    served = load_model(CoordinatorConfig(model=str(here))).identity
    assert identity_of(WorkerConfig(role=Role.DECODE, model=str(there))) == served
    file = there / "tokenizer.json"
    file.write_text(file.read_text().replace("<|bos|>", "<|box|>"))
    changed = identity_of(WorkerConfig(role=Role.DECODE, model=str(there)))
    assert changed == replace(served, tokenizer_hash=tokenizer_hash(there)) != served
