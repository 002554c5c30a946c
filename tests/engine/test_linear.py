"""Linear layers: every backend against float64, and the native one against itself bit for bit."""

from __future__ import annotations

import pytest
import torch

from engine.linear import (
    MkldnnLinear,
    NativeLinear,
    TorchLinear,
    activation_dtype,
    backend_name,
    make_linear,
)
from engine.native import NativeUnavailable, load

INSTRUCTION_SETS = ("generic", "avx2", "avx512")
DTYPES = (torch.bfloat16, torch.float32)


def kernels(instruction_set: str = ""):
    try:
        return load(instruction_set)
    except NativeUnavailable as error:
        pytest.skip(str(error))


def random(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(96, 576), (64, 1536), (100, 80), (33, 7), (1, 1), (16, 350)])
def test_the_native_product_is_the_float64_product_to_float32_accuracy(n, k, dtype, instruction_set):
    weight, bias = random(n, k, seed=2).to(dtype), random(n, seed=3)
    linear = NativeLinear(kernels(instruction_set), weight, bias, 1)
    for rows in (1, 3, 5, 17, 50):
        x = random(rows, k)
        expected = x.double() @ weight.double().T + bias
        torch.testing.assert_close(linear(x).double(), expected, rtol=1e-5, atol=2e-5 * k**0.5)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(192, 576), (64, 1536), (100, 80)])
def test_a_row_has_the_same_bits_alone_and_in_any_batch_with_any_number_of_threads(n, k, dtype, instruction_set):
    native = kernels(instruction_set)
    weight, bias = random(n, k, seed=2).to(dtype), random(n, seed=3)
    linear, threaded = NativeLinear(native, weight, bias, 1), NativeLinear(native, weight, bias, 3)
    x = random(256, k)
    expected = linear(x)
    assert torch.equal(threaded(x), expected)
    for rows in (1, 2, 3, 4, 7, 8, 13, 16, 17, 33, 100):
        for start in (0, 256 - rows):
            assert torch.equal(linear(x[start : start + rows].contiguous()), expected[start : start + rows])
    assert torch.equal(torch.cat([linear(x[i : i + 1]) for i in range(256)]), expected)


def test_the_wide_instruction_sets_agree_bit_for_bit():
    weight, x = random(96, 576, seed=2).bfloat16(), random(9, 576)
    results = [NativeLinear(kernels(name), weight, None, 1)(x) for name in ("avx2", "avx512")]
    assert torch.equal(results[0], results[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_the_packed_weight_are_those_of_the_original(dtype):
    weight = random(100, 80).to(dtype)
    ids = torch.tensor([99, 0, 31, 32, 64, 31])
    for linear in (NativeLinear(kernels(), weight, None, 1), TorchLinear(weight, None)):
        assert torch.equal(linear.rows(ids), weight[ids].float())


def test_zero_rows_give_zero_rows():
    assert make_linear(random(40, 16))(torch.empty(0, 16)).shape == (0, 40)


def test_inputs_of_another_dtype_or_stride_are_converted():
    weight = random(40, 16)
    linear = NativeLinear(kernels(), weight, None, 1)
    x = random(5, 32)[:, ::2]
    assert torch.equal(linear(x), linear(x.contiguous()))
    assert linear(x.bfloat16()).dtype is torch.float32


def test_the_weight_is_not_kept():
    weight = random(64, 64)
    held = make_linear(weight, threads=1)
    if isinstance(held, NativeLinear):
        weight.zero_()
        assert held(torch.ones(1, 64)).abs().max() > 0


def test_mkldnn_gives_the_product():
    weight, bias, x = random(40, 16, seed=2), random(40, seed=3), random(5, 16)
    torch.testing.assert_close(MkldnnLinear(weight, bias)(x), x @ weight.T + bias, rtol=1e-4, atol=1e-4)


def test_the_environment_forces_a_backend(monkeypatch):
    monkeypatch.setenv("KVRELAY_LINEAR", "torch")
    assert backend_name(torch.bfloat16) == "torch"
    assert activation_dtype(torch.bfloat16) is torch.bfloat16
    assert isinstance(make_linear(random(4, 4)), TorchLinear)
    monkeypatch.setenv("KVRELAY_LINEAR", "native")
    kernels()
    assert backend_name(torch.bfloat16) == "native"
    assert activation_dtype(torch.bfloat16) is torch.float32
