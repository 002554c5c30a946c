"""The native library: row-wise operations against torch, and what happens where it cannot be built or loaded."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest
import torch

from engine.native import NativeUnavailable, build, load, native, native_status, ops

DTYPES = (torch.float32, torch.bfloat16)
INSTRUCTION_SETS = ("generic", "avx2", "avx512")


@pytest.fixture
def fresh_status():
    native_status.cache_clear()
    yield
    native_status.cache_clear()


@pytest.fixture(params=INSTRUCTION_SETS)
def forced(request, monkeypatch, fresh_status):
    """The operations run on one instruction set."""
    try:
        load(request.param)
    except NativeUnavailable as error:
        pytest.skip(str(error))
    monkeypatch.setenv("KVRELAY_CPU_KERNEL", request.param)
    assert native().instruction_set == request.param


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.dtype is expected.dtype
    tolerance = 1e-5 if got.dtype is torch.float32 else 1e-2
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.usefixtures("forced")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [576, 33, 1])
def test_rms_norm_agrees_with_torch(n, dtype):
    x, weight = random(5, n, dtype=dtype), random(n, seed=2)
    close(ops.rms_norm(x, weight, 1e-5), ops.rms_norm_torch(x, weight, 1e-5))
    out = torch.empty_like(x)
    assert ops.rms_norm(x, weight, 1e-5, out, threads=2) is out
    assert torch.equal(out, ops.rms_norm(x, weight, 1e-5))


@pytest.mark.usefixtures("forced")
@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_adds_in_place_and_agrees_with_torch(dtype):
    x, residual, weight = random(5, 100, dtype=dtype), random(5, 100, dtype=dtype, seed=3), random(100)
    total = residual + x
    got = ops.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, total)
    close(got, ops.rms_norm_torch(total, weight, 1e-5))


@pytest.mark.usefixtures("forced")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1536, 7])
def test_silu_mul_agrees_with_torch_over_the_whole_range(n, dtype):
    gate_up = random(5, 2 * n, dtype=dtype) * 4
    gate_up[0, :7] = torch.tensor([0.0, 100.0, -100.0, 80.0, -80.0, 1e30, -1e30], dtype=dtype)
    close(ops.silu_mul(gate_up), ops.silu_mul_torch(gate_up))
    assert torch.equal(ops.silu_mul(gate_up, threads=2), ops.silu_mul(gate_up))


@pytest.mark.usefixtures("forced")
@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding_widens_the_rows_of_the_ids(dtype):
    table, ids = random(50, 24, dtype=dtype), torch.tensor([49, 0, 7, 7])
    assert torch.equal(ops.embedding(ids, table, torch.float32), table[ids].float())
    assert torch.equal(ops.embedding(ids, table, torch.bfloat16), table[ids].bfloat16())


def test_rows_do_not_see_each_other():
    x, weight, gate_up = random(9, 576), random(576, seed=2), random(9, 3072)
    norm, gated = ops.rms_norm(x, weight, 1e-5), ops.silu_mul(gate_up)
    for i in range(9):
        assert torch.equal(ops.rms_norm(x[i : i + 1], weight, 1e-5), norm[i : i + 1])
        assert torch.equal(ops.silu_mul(gate_up[i : i + 1]), gated[i : i + 1])


def test_without_a_compiler_there_is_a_reason_and_the_operations_still_work(
    monkeypatch, tmp_path, caplog, fresh_status
):
    monkeypatch.setenv("KVRELAY_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with caplog.at_level(logging.WARNING):
        assert native() is None
    assert "no C++ compiler" in native_status().detail
    assert "no C++ compiler" in caplog.text
    x, weight = random(3, 8), random(8)
    assert torch.equal(ops.rms_norm(x, weight, 1e-5), ops.rms_norm_torch(x, weight, 1e-5))


def test_a_failing_compiler_is_quoted(monkeypatch, tmp_path):
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\necho 'sorry, unimplemented' >&2\nexit 3\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("KVRELAY_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", str(compiler))
    built = build.build()
    assert built.path is None
    assert "sorry, unimplemented" in built.detail
    assert list((tmp_path / "native").glob("*.so")) == []


def test_a_library_that_is_none_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("KVRELAY_CACHE", str(tmp_path))
    path = build.library_path()
    path.parent.mkdir(parents=True)
    path.write_bytes(b"not a library")
    with pytest.raises(NativeUnavailable, match="does not load"):
        load()


def test_an_unknown_instruction_set_is_refused():
    if native() is None:
        pytest.skip(native_status().detail)
    with pytest.raises(NativeUnavailable, match="'sse9' does not run here"):
        load("sse9")


def test_the_build_command_says_what_it_did():
    done = subprocess.run(
        [sys.executable, "-m", "engine.native.build"], capture_output=True, text=True, timeout=100, check=True
    )
    assert done.stdout.startswith(("native kernels: ", "no native kernels: "))
    assert done.stderr == ""
