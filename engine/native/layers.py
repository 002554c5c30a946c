"""Several decoder layers in one native call: the second path of engine.llama, bit for bit the first one.

A decode step makes a few hundred small calls from Python and as many OpenMP regions; this makes one of each.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from engine.attention.base import AttentionBackend
from engine.attention.cpu import CpuAttention
from engine.linear import NativeLinear
from engine.tensors import StepBatch

_MATRICES = ("qkv", "output", "gate_up", "down")


class DecoderLayer(Protocol):
    """What is read of engine.llama.Layer. Norms are float32 [hidden]."""

    @property
    def input_norm(self) -> Tensor: ...
    @property
    def mlp_norm(self) -> Tensor: ...
    @property
    def qkv(self) -> Callable[[Tensor], Tensor]: ...
    @property
    def output(self) -> Callable[[Tensor], Tensor]: ...
    @property
    def gate_up(self) -> Callable[[Tensor], Tensor]: ...
    @property
    def down(self) -> Callable[[Tensor], Tensor]: ...


class _Matrix(ctypes.Structure):
    """KvrMatrix of layers.h."""

    _fields_ = (
        ("packed", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("n", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("is_bf16", ctypes.c_int64),
    )


class _Layer(ctypes.Structure):
    """KvrLayer of layers.h."""

    _fields_ = (*((name, _Matrix) for name in _MATRICES), ("mlp_norm", ctypes.c_void_p), ("next_norm", ctypes.c_void_p))


class _Layers(ctypes.Structure):
    """KvrLayers of layers.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("layers", "attention", "x", "residual", "gate_up", "gated")),
        ("count", ctypes.c_int64),
        ("eps", ctypes.c_double),
    )


def fused_layers(layers: Sequence[DecoderLayer], attention: AttentionBackend, eps: float) -> FusedLayers | None:
    """All of `layers` but the last as one call, or None where a matrix or the attention is not native."""
    if len(layers) < 2 or not isinstance(attention, CpuAttention):
        return None
    if not all(isinstance(getattr(layer, name), NativeLinear) for layer in layers for name in _MATRICES):
        return None
    return FusedLayers(layers, attention, eps)


class FusedLayers:
    """Layers 0 .. n - 2 of n. Keeps the weights alive; one owner thread."""

    def __init__(self, layers: Sequence[DecoderLayer], attention: CpuAttention, eps: float) -> None:
        self._held = tuple(layers)
        self._attention = attention
        self._call = attention.kernels.layers
        self.count = len(layers) - 1
        self._table = (_Layer * self.count)(*map(_entry, layers[:-1], layers[1:]))
        self._mlp = self._table[0].down.k
        self._arguments = _Layers(layers=ctypes.addressof(self._table), count=self.count, eps=eps)

    def forward(self, x: Tensor, residual: Tensor, pool: Tensor, batch: StepBatch, rope: Tensor) -> None:
        """x, residual float32 [rows, hidden], changed in place: from the first layer's normed input to the last one's.

        pool, batch and rope are those of AttentionBackend.forward; the KV of these layers is in the pool afterwards.
        """
        assert x.is_contiguous()
        assert residual.is_contiguous()
        assert x.dtype is residual.dtype is torch.float32
        a, port = self._arguments, self._attention
        widths = (
            (port.heads + 2 * port.kv_heads) * port.head_dim,
            port.heads * port.head_dim,
            2 * self._mlp,
            self._mlp,
        )
        scratch = torch.empty(x.shape[0] * sum(widths))
        addresses, at = [], scratch.data_ptr()
        for width in widths:
            addresses.append(at)
            at += 4 * x.shape[0] * width
        qkv, out, a.gate_up, a.gated = addresses
        a.attention = port.arguments(0, qkv, 0, pool, batch, rope, out)
        a.x, a.residual = x.data_ptr(), residual.data_ptr()
        if self._call(ctypes.addressof(a)):
            raise MemoryError("the layers' kernel could not list its tasks")


def _entry(layer: DecoderLayer, following: DecoderLayer) -> Any:
    matrices = []
    for name in _MATRICES:
        linear = getattr(layer, name)
        assert isinstance(linear, NativeLinear)
        matrices.append(_Matrix(*linear.matrix()))
    for norm in (layer.mlp_norm, following.input_norm):
        assert norm.dtype is torch.float32
    return _Layer(*matrices, layer.mlp_norm.data_ptr(), following.input_norm.data_ptr())
