"""A real model behind the executor port."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.steps import part, plan
from support.tiny_llama import TinyShape, random_llama

from engine.plan import Plan, Result
from engine.torch_executor import TorchExecutor, TorchOptions, pool_tensor
from kvrelay.blocks import KVLayout
from kvrelay.errors import Internal, InvalidArgument
from kvrelay.requests import Sampling

PROMPT = [(11 * i + 5) % 250 for i in range(40)]


def generate(executor: TorchExecutor, count: int, sampling: Sampling, block_ids: list[int]) -> list[int]:
    known, start = list(PROMPT), 0
    for index in range(count):
        step = plan(part("a", known[start:], start, block_ids, index=index, sampling=sampling), step_id=index)
        result = executor.run(step)
        assert result.step_id == index
        start = len(known)
        known.extend(result.token_ids)
    return known[len(PROMPT) :]


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.0), Sampling(seed=4, top_k=50)])
def test_backends_and_blocks_do_not_change_the_tokens(tmp_path: Path, sampling: Sampling) -> None:
    random_llama(tmp_path)
    tokens = []
    for attention, block_ids in (("reference", [0, 1, 2, 3]), ("auto", [7, 2, 11, 0])):
        executor = TorchExecutor(tmp_path, TorchOptions(dtype="float32", num_blocks=12, attention=attention))
        tokens.append(generate(executor, 20, sampling, block_ids))
        executor.close()
    assert tokens[0] == tokens[1]
    assert len(set(tokens[0])) > 5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kv_moved_to_another_executor_goes_on_where_it_was(tmp_path: Path, dtype: str) -> None:
    random_llama(tmp_path, shape=TinyShape(tied=True))
    options = TorchOptions(dtype=dtype, num_blocks=8)
    prefill, decode = TorchExecutor(tmp_path, options), TorchExecutor(tmp_path, options)
    expected = generate(prefill, 5, Sampling(temperature=0.0), [0, 1, 2])
    first = prefill.run(plan(part("a", PROMPT, 0, [3, 4, 5]))).token_ids[0]
    for source, target in ((3, 7), (4, 6), (5, 2)):
        decode.pool.write(target, 0, prefill.pool.read(source))
    known = [*PROMPT, first]
    while len(known) < len(PROMPT) + 5:
        step = plan(part("a", known[-1:], len(known) - 1, [7, 6, 2], index=len(known) - len(PROMPT)))
        known.extend(decode.run(step).token_ids)
    assert known[len(PROMPT) :] == expected
    prefill.close()
    decode.close()


def test_the_pool_is_the_tensor_the_model_writes(tmp_path: Path) -> None:
    random_llama(tmp_path)
    executor = TorchExecutor(tmp_path, TorchOptions(dtype="bfloat16", num_blocks=4))
    assert executor.layout == KVLayout(kv_heads=2, layers=2, block_size=16, head_dim=16, dtype="bfloat16")
    assert executor.run(plan(part("a", PROMPT[:3], 0, [2], samples=False))) == Result(0, ())
    tensor = pool_tensor(executor.pool)
    assert tensor.shape == (4, 2, 2, 2, 16, 16)
    assert tensor.dtype is torch.bfloat16
    assert bytes(executor.pool.read(0)) == bytes(executor.layout.block_bytes)
    assert bytes(executor.pool.read(2)) == tensor[2].view(torch.uint8).numpy().tobytes()
    assert bool((tensor[2, :, :, :, :3] != 0).any(dim=-1).all())
    executor.close()


def test_an_empty_plan_gives_an_empty_result(tmp_path: Path) -> None:
    executor = TorchExecutor(random_llama(tmp_path), TorchOptions(num_blocks=1))
    assert executor.run(Plan(3, ())) == Result(3, ())
    executor.close()


def test_a_plan_outside_the_model_is_refused_before_a_kernel_sees_it(tmp_path: Path) -> None:
    executor = TorchExecutor(random_llama(tmp_path), TorchOptions(num_blocks=2))
    with pytest.raises(Internal, match=r"token ids 3 .. 320 of a step are outside the vocabulary of 320"):
        executor.run(plan(part("a", [3, 320], 0, [0])))
    with pytest.raises(Internal, match="reaches position 32, the model or pool ends at 31"):
        executor.run(plan(part("a", [1], 32, [0, 1, 0])))
    with pytest.raises(Internal, match=r"block 2 .* a pool of 2"):
        executor.run(plan(part("a", [1], 16, [0, 2])))
    executor.close()


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"dtype": "int4"}, "dtype"), ({"attention": "flash"}, "attention"), ({"num_blocks": 0}, "num_blocks")],
)
def test_a_bad_option_is_named(changes: dict[str, str | int], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        TorchOptions(**changes)  # type: ignore[arg-type]  # wrong on purpose
    assert caught.value.field == field


def test_loading_never_imports_transformers(tmp_path: Path) -> None:
    random_llama(tmp_path)
    code = (
        "import sys; from engine.torch_executor import TorchExecutor, TorchOptions; "
        f"TorchExecutor({str(tmp_path)!r}, TorchOptions(num_blocks=2)).close(); "
        "print([m for m in ('transformers', 'gguf', 'grpc') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
