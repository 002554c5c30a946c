"""Linear layers with the weight prepared once for the processor it runs on. Knows no model.

1. `mkldnn`: bfloat16 on a processor that multiplies it natively; oneDNN's blocked layout, bfloat16 activations. Which
   kernel oneDNN takes may depend on the number of rows, so bits of a row may depend on its batch.
2. `native`: our panels (engine/native), bfloat16 kept in memory and widened in registers, float32 activations. A row's
   result has the same bits whatever else is in the batch.
3. `torch`: plain F.linear, where neither runs.

KVRELAY_LINEAR=native|mkldnn|torch forces one. Only the prepared copy of a weight is kept.
"""

from __future__ import annotations

import os
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.native import PANEL, Native, native

_IS_BF16 = {torch.float32: 0, torch.bfloat16: 1}
_PREPACK_ROWS = 32  # oneDNN picks a layout for this many rows; other counts work with it


class Linear(Protocol):
    """x [rows, in] -> [rows, out], in the dtype of `activation_dtype`."""

    def __call__(self, x: Tensor) -> Tensor: ...


def backend_name(weight_dtype: torch.dtype) -> str:
    """native, mkldnn or torch: what `make_linear` uses for CPU weights of this dtype."""
    forced = os.environ.get("KVRELAY_LINEAR", "")
    if forced in {"mkldnn", "torch"}:
        return forced
    if not forced and weight_dtype is torch.bfloat16 and _multiplies_bf16():
        return "mkldnn"
    return "native" if weight_dtype in _IS_BF16 and native() is not None else "torch"


def activation_dtype(weight_dtype: torch.dtype) -> torch.dtype:
    """The dtype of activations between linear layers whose weights have `weight_dtype`."""
    return torch.float32 if backend_name(weight_dtype) == "native" else weight_dtype


def make_linear(weight: Tensor, bias: Tensor | None = None, *, threads: int = 1) -> Linear:
    """Prepare weight [out, in] and bias [out] for use by `threads` threads; neither is kept if a copy is packed.

    mkldnn and torch use torch's own thread count, which `threads` does not set.
    """
    backend = backend_name(weight.dtype) if weight.device.type == "cpu" else "torch"
    kernels = native()
    if backend == "native" and kernels is not None:
        return NativeLinear(kernels, weight, bias, threads)
    if backend == "mkldnn":
        return MkldnnLinear(weight, bias)
    return TorchLinear(weight, bias)


def make_head(weight: Tensor, bias: Tensor | None = None, *, threads: int = 1) -> Linear:
    """As make_linear, for the layer that makes logits: native where it can be, since its results are float32."""
    kernels = native() if os.environ.get("KVRELAY_LINEAR", "") != "torch" else None
    if kernels is not None and weight.device.type == "cpu" and weight.dtype in _IS_BF16:
        return NativeLinear(kernels, weight, bias, threads)
    return make_linear(weight, bias, threads=threads)


class NativeLinear:
    """Panels of 32 output columns; see engine/native/gemm.h for the order of the arithmetic."""

    def __init__(self, kernels: Native, weight: Tensor, bias: Tensor | None, threads: int) -> None:
        weight = weight.contiguous()
        self._out, self._in = weight.shape
        self._is_bf16 = _IS_BF16[weight.dtype]
        self._packed = weight.new_empty(-(-self._out // PANEL) * PANEL * self._in)
        self._bias = None if bias is None else bias.float().contiguous()
        self._threads = threads
        self._kernels = kernels
        # Resolved once: a decode step makes a few hundred of these calls.
        self._linear = kernels.linear
        self._packed_at = self._packed.data_ptr()
        self._bias_at = None if self._bias is None else self._bias.data_ptr()
        kernels.pack(weight.data_ptr(), self._is_bf16, self._out, self._in, self._packed_at, threads)

    def __call__(self, x: Tensor) -> Tensor:
        """float32 [rows, in] -> float32 [rows, out]; other dtypes are converted first."""
        if x.dtype is not torch.float32 or not x.is_contiguous():
            x = x.float().contiguous()
        rows, n, k = x.shape[0], self._out, self._in
        y = torch.empty(rows, n)
        self._linear(
            x.data_ptr(),
            k,
            rows,
            self._packed_at,
            self._is_bf16,
            n,
            k,
            self._bias_at,
            y.data_ptr(),
            n,
            self._threads,
        )
        return y

    def matrix(self) -> tuple[int, int | None, int, int, int]:
        """Address of the panels, address of the bias or None, out, in, whether bfloat16: good while this lives."""
        return self._packed_at, self._bias_at, self._out, self._in, self._is_bf16

    def rows(self, ids: Tensor) -> Tensor:
        """Rows `ids` (int64, in range) of the original weight, float32: a tied embedding without a second copy."""
        ids = ids.contiguous()
        out = torch.empty(ids.shape[0], self._in)
        at = out.data_ptr()
        self._kernels.unpack_rows(self._packed_at, self._is_bf16, self._in, ids.data_ptr(), ids.shape[0], at)
        return out


class MkldnnLinear:
    """oneDNN with a prepacked weight; activations and result have the weight's dtype."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PREPACK_ROWS)
        self._bias = None if bias is None else bias.to(weight.dtype)
        self._dtype = weight.dtype

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x.to(self._dtype), self._packed, self._bias, "none", [], "")
        return y


class TorchLinear:
    """F.linear on the weight as it is."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, None if bias is None else bias.to(weight.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x.to(self._weight.dtype), self._weight, self._bias)

    def rows(self, ids: Tensor) -> Tensor:
        return self._weight[ids].float()


def _multiplies_bf16() -> bool:
    """Whether oneDNN and the processor both multiply bfloat16; emulated it is slower than our panels."""
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))
