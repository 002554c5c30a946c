"""Turns a Llama GGUF file into a Hugging Face directory (bf16). Knows neither the catalog nor the network.

Run as a process of its own, `python -m kvrelay.models.convert FILE DIRECTORY`, so that numpy and gguf never
enter the caller. Weights are dequantized, rounded to bf16 (nearest, ties to even) and written tensor by tensor;
the tokenizer is rebuilt from the vocabulary and merges inside the file.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

PRE_TOKENIZERS: dict[str, list[dict[str, Any]]] = {
    "smollm": [
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    ],
}
"""What `tokenizer.ggml.pre` means; a name that is not here is refused, for a wrong guess gives other tokens."""

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_CONTROL_TOKEN = 3


def hf_name(gguf_name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight"""
    head, *rest = gguf_name.split(".")
    if head == "blk":
        layer, name, kind = rest
        return f"model.layers.{layer}.{_LAYER_NAMES[name]}.{kind}"
    return f"{_TOP_NAMES[head]}.{rest[0]}"


def convert(source: Path, directory: Path) -> None:
    """Write config.json, model.safetensors, tokenizer.json and what belongs to them into an existing directory."""
    import gguf

    reader = gguf.GGUFReader(source)

    def field(name: str) -> Any:
        return reader.fields[name].contents()

    names = {tensor.name for tensor in reader.tensors}
    config = _config(field, tied="output.weight" not in names)
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", {key: config[key] for key in ("bos_token_id", "eos_token_id")})
    _write_tokenizer(field, directory)
    _write_weights(reader.tensors, config, directory / "model.safetensors")


def _config(field: Callable[[str], Any], tied: bool) -> dict[str, Any]:
    if field("general.architecture") != "llama":
        raise SystemExit(f"architecture {field('general.architecture')} is not supported, only llama")
    heads = int(field("llama.attention.head_count"))
    hidden = int(field("llama.embedding_length"))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": int(field("llama.feed_forward_length")),
        "num_hidden_layers": int(field("llama.block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(field("llama.attention.head_count_kv")),
        "head_dim": hidden // heads,
        "max_position_embeddings": int(field("llama.context_length")),
        "rope_theta": float(field("llama.rope.freq_base")),
        # The file holds a float32: 7 digits give back the number that was meant.
        "rms_norm_eps": float(f"{field('llama.attention.layer_norm_rms_epsilon'):.7g}"),
        "tie_word_embeddings": tied,
        "vocab_size": len(field("tokenizer.ggml.tokens")),
        "bos_token_id": int(field("tokenizer.ggml.bos_token_id")),
        "eos_token_id": int(field("tokenizer.ggml.eos_token_id")),
        "torch_dtype": "bfloat16",
    }


def _write_tokenizer(field: Callable[[str], Any], directory: Path) -> None:
    pre = field("tokenizer.ggml.pre")
    if field("tokenizer.ggml.model") != "gpt2" or pre not in PRE_TOKENIZERS:
        raise SystemExit(f"tokenizer {field('tokenizer.ggml.model')}/{pre} is not supported")
    tokens: list[str] = field("tokenizer.ggml.tokens")
    kinds: list[int] = field("tokenizer.ggml.token_type")
    merges = [merge.split(" ") for merge in field("tokenizer.ggml.merges")]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    special = [{"id": i, "content": t, **flags} for i, t in enumerate(tokens) if kinds[i] == _CONTROL_TOKEN]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": PRE_TOKENIZERS[pre]},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "vocab": vocab, "merges": merges},
    }
    _write_json(directory / "tokenizer.json", tokenizer, indent=None)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[field("tokenizer.ggml.bos_token_id")],
        "eos_token": tokens[field("tokenizer.ggml.eos_token_id")],
        "unk_token": tokens[field("tokenizer.ggml.unknown_token_id")],
        "pad_token": tokens[field("tokenizer.ggml.padding_token_id")],
        "model_max_length": int(field("llama.context_length")),
        "clean_up_tokenization_spaces": False,
        "chat_template": field("tokenizer.chat_template"),
    }
    _write_json(directory / "tokenizer_config.json", settings)


def _write_weights(tensors: list[Any], config: dict[str, Any], file: Path) -> None:
    """One safetensors file: the header is known before any weight is dequantized, so one tensor is held at a time."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        shape = [int(size) for size in reversed(tensor.shape)]
        start, end = end, end + 2 * int(tensor.n_elements)
        header[hf_name(tensor.name)] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with file.open("wb") as stream:
        stream.write(len(raw).to_bytes(8, "little") + raw)
        for number, tensor in enumerate(tensors, start=1):
            stream.write(_bf16_bytes(tensor, config))
            if number % 50 == 0 or number == len(tensors):
                print(f"converted {number} of {len(tensors)} tensors", flush=True)


def _bf16_bytes(tensor: Any, config: dict[str, Any]) -> bytes:
    """A tensor's weights as little-endian bf16, q and k rows back in Hugging Face's order."""
    import gguf
    import numpy as np

    weight = np.asarray(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for name, count in heads.items():
        if f".{name}." in tensor.name:
            # GGUF interleaves the two halves that rotate against each other.
            rows, columns = weight.shape
            weight = weight.reshape(count, rows // count // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
    bits = np.ascontiguousarray(weight).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()


def _write_json(path: Path, value: dict[str, Any], indent: int | None = 2) -> None:
    path.write_text(json.dumps(value, indent=indent, ensure_ascii=False), encoding="utf-8")


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
