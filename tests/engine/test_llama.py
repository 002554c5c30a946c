"""The Llama pass: it agrees with transformers, and no way of cutting or mixing a step changes what it says."""

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import jinja2
import pytest
import torch
from support.steps import part, plan
from support.tiny_llama import TinyShape, random_llama
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from engine.attention.reference import ReferenceAttention
from engine.linear import activation_dtype, make_head, make_linear
from engine.llama import Backends, LlamaModel
from engine.plan import Plan
from engine.rope import rope_table
from engine.tensors import step_batch
from engine.torch_executor import model_layout
from engine.weights import Checkpoint
from kvrelay.errors import NotFound
from kvrelay.models.catalog import resolve
from kvrelay.models.config import ModelConfig

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
PROMPT = [(7 * i + 3) % 250 for i in range(50)]


class Bench:
    """A float32 model with a pool of its own, run by hand-made plans."""

    def __init__(self, directory: Path, num_blocks: int = 32) -> None:
        self.config = config = ModelConfig.from_dir(directory)
        attention = ReferenceAttention(config.heads, config.kv_heads, config.head_dim)
        backends = Backends(attention, make_linear, make_head, activation_dtype(torch.float32), threads=1)
        with Checkpoint(directory, torch.float32) as checkpoint:
            self.model = LlamaModel(config, checkpoint, backends, rope_table(config, num_blocks * 16))
        self.pool = torch.zeros(num_blocks, *model_layout(config, "float32", 16).shape)

    def logits(self, step: Plan) -> torch.Tensor:
        return self.model.forward(step_batch(step), self.pool)


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture
def smollm2() -> Path:
    try:
        return resolve("smollm2-135m-instruct")
    except NotFound as error:
        pytest.skip(error.message)


def transformers_logits(directory: Path, token_ids: list[int]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    logits: torch.Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits


SHAPES = [
    TinyShape(),
    TinyShape(tied=True, kv_heads=4),
    TinyShape(bias=True, kv_heads=1, layers=3),
    TinyShape(rope_scaling=LLAMA3, shards=2),
]


@pytest.mark.parametrize("shape", SHAPES, ids=["gqa", "tied-mha", "bias-mqa", "llama3-rope"])
def test_logits_agree_with_transformers(tmp_path: Path, shape: TinyShape) -> None:
    bench = Bench(random_llama(tmp_path, seed=1, shape=shape))
    rows = [part("a", PROMPT[: i + 1], 0, range(4 * i, 4 * i + 4)) for i in (0, 3)]
    found = bench.logits(plan(*rows, part("a", PROMPT, 0, range(20, 24))))
    expected = transformers_logits(tmp_path, PROMPT)[[0, 3, 49]]
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_chunks_give_what_the_whole_gives(tmp_path: Path) -> None:
    bench = Bench(random_llama(tmp_path))
    whole = bench.logits(plan(part("a", PROMPT, 0, range(4))))
    for cuts in ([0, 16, 32, 50], [0, 1, 49, 50], [0, 7, 33, 50]):
        bench.pool.zero_()
        for start, end in pairwise(cuts):
            step = plan(part("a", PROMPT[start:end], start, [9, 4, 30, 11], samples=end == 50))
            found = bench.logits(step)
            assert found.shape == (int(end == 50), 320)
        torch.testing.assert_close(found, whole, rtol=0, atol=1e-4)


def test_a_sequence_in_a_batch_gives_what_it_gives_alone(tmp_path: Path) -> None:
    bench = Bench(random_llama(tmp_path))
    alone = bench.logits(plan(part("a", PROMPT, 0, range(4))))
    first = [part("a", PROMPT[:49], 0, range(4), samples=False), part("b", PROMPT[::-1], 0, range(8, 12))]
    bench.logits(plan(*first))
    mixed = [
        part("a", PROMPT[49:], 49, range(4)),
        part("b", [5], 50, range(8, 12)),
        part("c", PROMPT[5:30], 0, range(20, 24), samples=False),
    ]
    found = bench.logits(plan(*mixed))
    assert found.shape == (2, 320)
    torch.testing.assert_close(found[:1], alone, rtol=0, atol=1e-4)


def test_only_the_slots_of_the_step_are_written(tmp_path: Path) -> None:
    bench = Bench(random_llama(tmp_path))
    bench.logits(plan(part("a", PROMPT[:18], 0, [3, 5])))
    written = bench.pool.abs().amax(dim=(1, 3, 5))  # [num_blocks, layers, block_size]
    assert bool((written[3] > 0).all())
    assert bool((written[5, :, :2] > 0).all())
    written[3] = written[5, :, :2] = 0
    assert not written.any()


def answer(bench: Bench, directory: Path, question: str) -> str:
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    template = json.loads((directory / "tokenizer_config.json").read_text())["chat_template"]
    messages = [{"role": "user", "content": question}]
    text = jinja2.Template(template).render(messages=messages, add_generation_prompt=True)
    known, start = tokenizer.encode(text).ids, 0
    prompt = len(known)
    while known[-1] not in bench.config.eos_ids or len(known) == prompt:
        assert len(known) < prompt + 20
        logits = bench.logits(plan(part("a", known[start:], start, range(32))))
        start = len(known)
        known.append(int(logits.argmax()))
    decoded: str = tokenizer.decode(known[prompt:])
    return decoded


@pytest.mark.model
def test_smollm2_agrees_with_transformers_and_knows_the_capital_of_france(smollm2: Path) -> None:
    bench = Bench(smollm2)
    prompt = Tokenizer.from_file(str(smollm2 / "tokenizer.json")).encode("Water boils at a temperature of").ids
    found = bench.logits(plan(part("a", prompt, 0, [2])))[0]
    expected = transformers_logits(smollm2, prompt)[-1]
    assert int(found.argmax()) == int(expected.argmax())
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=2e-3)
    assert answer(bench, smollm2, "What is the capital of France?") == "The capital of France is Paris."
