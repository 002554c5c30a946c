"""Row-wise operations of a model: norms, gated activation, embedding lookup. Native where it can be, else torch.

Every row's result depends on that row alone. Arguments are contiguous; a result is new unless `out` is given.
The native path takes float32 and bfloat16 on the CPU, computes in float32 and rounds once, at the end.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.native import Native, native

_IS_BF16 = {torch.float32: 0, torch.bfloat16: 1}


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None, *, threads: int = 1) -> Tensor:
    """x [rows, n], weight float32 [n] -> x / rms(x) * weight, in x's dtype."""
    kernels = _kernels(x)
    if kernels is None or weight.dtype is not torch.float32:
        return _into(out, rms_norm_torch(x, weight, eps))
    return _native_norm(kernels, x, None, weight, eps, out, threads)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor | None = None, *, threads: int = 1
) -> Tensor:
    """residual += x in place, then the norm of residual. Shapes as rms_norm."""
    kernels = _kernels(x)
    if kernels is None or weight.dtype is not torch.float32 or residual.dtype is not x.dtype:
        return _into(out, rms_norm_torch(residual.add_(x), weight, eps))
    return _native_norm(kernels, x, residual, weight, eps, out, threads)


def silu_mul(gate_up: Tensor, out: Tensor | None = None, *, threads: int = 1) -> Tensor:
    """gate_up [rows, 2 n], gate first -> silu(gate) * up [rows, n]."""
    kernels = _kernels(gate_up)
    if kernels is None:
        return _into(out, silu_mul_torch(gate_up))
    rows, n = gate_up.shape[0], gate_up.shape[1] // 2
    if out is None:
        out = gate_up.new_empty(rows, n)
    kernels.silu_mul(gate_up.data_ptr(), _IS_BF16[gate_up.dtype], rows, n, out.data_ptr(), threads)
    return out


def embedding(ids: Tensor, table: Tensor, dtype: torch.dtype) -> Tensor:
    """ids int64 [rows], table [vocab, n] -> its rows in `dtype`. Ids lie in the table: the caller has checked them."""
    kernels = _kernels(table)
    if kernels is None or dtype is not torch.float32:
        return F.embedding(ids, table).to(dtype)
    out = torch.empty(ids.shape[0], table.shape[1])
    kernels.embed(table.data_ptr(), _IS_BF16[table.dtype], out.shape[1], ids.data_ptr(), ids.shape[0], out.data_ptr())
    return out


def rms_norm_torch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def silu_mul_torch(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def _native_norm(
    kernels: Native, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor | None, threads: int
) -> Tensor:
    if out is None:
        out = torch.empty_like(x)
    rows, n = x.shape
    sum_into = None if residual is None else residual.data_ptr()
    is_bf16 = _IS_BF16[x.dtype]
    kernels.rms_norm(x.data_ptr(), sum_into, weight.data_ptr(), is_bf16, rows, n, eps, out.data_ptr(), threads)
    return out


def _kernels(x: Tensor) -> Native | None:
    if x.is_cpu and x.is_contiguous() and x.dtype in _IS_BF16:
        return native()
    return None


def _into(out: Tensor | None, result: Tensor) -> Tensor:
    return result if out is None else out.copy_(result)
