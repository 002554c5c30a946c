"""The native CPU kernels: built, loaded, checked and bound once, when first asked for. Knows no model.

`native()` gives them, or None; `native_status()` says which instruction set runs or why none does.
KVRELAY_CPU_KERNEL=generic|avx2|avx512 forces one, KVRELAY_CPU_KERNEL=off turns them off.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch  # before the library: its OpenMP runtime then serves both

ABI = 1
PANEL = 32  # columns of a packed panel, as in gemm.h

_log = logging.getLogger(__name__)
_P, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
_SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "kvr_pack": (None, (_P, ctypes.c_int, _I, _I, _P, _I)),
    "kvr_unpack_rows": (None, (_P, ctypes.c_int, _I, _P, _I, _P)),
    "kvr_linear": (None, (_P, _I, _I, _P, ctypes.c_int, _I, _I, _P, _P, _I, _I)),
    "kvr_rms_norm": (None, (_P, _P, _P, ctypes.c_int, _I, _I, _F, _P, _I)),
    "kvr_silu_mul": (None, (_P, ctypes.c_int, _I, _I, _P, _I)),
    "kvr_embed": (None, (_P, ctypes.c_int, _I, _P, _I, _P)),
    "kvr_attention": (ctypes.c_int, (_P,)),
    "kvr_layers": (ctypes.c_int, (_P,)),
    "kvr_read": (ctypes.c_float, (_P, _I, _I)),
    "kvr_read_tiles": (ctypes.c_float, (_P, _I, _P, _I, _I)),
    "kvr_multiply": (ctypes.c_float, (_I, _I)),
}


class NativeUnavailable(RuntimeError):
    """The kernels cannot run here; the message says why."""


@dataclass(frozen=True, slots=True)
class Native:
    """The bound C functions of one instruction set (arguments: addresses and counts; see kernels.cpp)."""

    instruction_set: str
    pack: Callable[..., None]
    unpack_rows: Callable[..., None]
    linear: Callable[..., None]
    rms_norm: Callable[..., None]
    silu_mul: Callable[..., None]
    embed: Callable[..., None]
    attention: Callable[..., int]
    layers: Callable[..., int]
    read: Callable[..., float]
    read_tiles: Callable[..., float]
    multiply: Callable[..., float]


@dataclass(frozen=True, slots=True)
class NativeStatus:
    """What `native()` found: the kernels or None, and one sentence for logs."""

    kernels: Native | None
    detail: str


def native() -> Native | None:
    """The kernels of the best instruction set here, or None (then use torch; the reason was logged once)."""
    return native_status().kernels


@functools.cache
def native_status() -> NativeStatus:
    wanted = os.environ.get("KVRELAY_CPU_KERNEL", "")
    if wanted == "off":
        return NativeStatus(None, "native kernels: off by KVRELAY_CPU_KERNEL")
    try:
        kernels = load(wanted)
    except NativeUnavailable as error:
        _log.warning("%s; torch is used instead", error)
        return NativeStatus(None, str(error))
    return NativeStatus(kernels, f"native kernels: {kernels.instruction_set}")


def load(instruction_set: str = "") -> Native:
    """Build if need be, bind and check one instruction set ("": the widest this processor runs).

    Raises NativeUnavailable: no compiler, wrong ABI, unknown or unsupported set, or a wrong result of the self-check.
    """
    from engine.native.build import build, instruction_sets  # here, so that `python -m engine.native.build` is one copy

    built = build()
    if built.path is None:
        raise NativeUnavailable(built.detail)
    library = _open(built.path)
    supported = [name for name in instruction_sets() if getattr(library, f"kvr_can_run_{name}")()]
    chosen = instruction_set or supported[-1]
    if chosen not in supported:
        raise NativeUnavailable(f"instruction set {chosen!r} does not run here (these do: {', '.join(supported)})")
    kernels = _bind(library, chosen)
    _self_check(kernels)
    return kernels


def _open(path: Path) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(path))
        abi = library.kvr_abi()
    except (OSError, AttributeError) as error:
        raise NativeUnavailable(f"no native kernels: {path} does not load: {error}") from error
    if abi != ABI:
        raise NativeUnavailable(f"no native kernels: {path} has ABI {abi}, {ABI} is needed")
    return library


def _bind(library: ctypes.CDLL, instruction_set: str) -> Native:
    bound = {}
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, f"{name}_{instruction_set}")
        function.restype, function.argtypes = result, arguments
        bound[name.removeprefix("kvr_")] = function
    return Native(instruction_set=instruction_set, **bound)


def _self_check(kernels: Native) -> None:
    """One small product and one norm against torch: a miscompiled library must not serve."""
    torch_seed = torch.Generator().manual_seed(7)
    x = torch.randn(7, 48, generator=torch_seed)
    weight = torch.randn(40, 48, generator=torch_seed).bfloat16()
    packed = torch.empty(2 * PANEL * 48, dtype=torch.bfloat16)
    y, z = torch.empty(7, 40), torch.empty(7, 40)
    ones = torch.ones(40)
    kernels.pack(weight.data_ptr(), 1, 40, 48, packed.data_ptr(), 1)
    kernels.linear(x.data_ptr(), 48, 7, packed.data_ptr(), 1, 40, 48, None, y.data_ptr(), 40, 1)
    kernels.rms_norm(y.data_ptr(), None, ones.data_ptr(), 0, 7, 40, 1e-5, z.data_ptr(), 1)
    expected = x @ weight.float().T
    close = torch.allclose(y, expected, rtol=1e-4, atol=1e-4)
    if not close or not torch.allclose(z, torch.rms_norm(expected, (40,), ones, 1e-5), rtol=1e-4, atol=1e-4):
        raise NativeUnavailable(f"no native kernels: {kernels.instruction_set} failed its self-check")
