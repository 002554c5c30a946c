"""Tensors out of a model directory's safetensors files, one at a time, in the dtype wanted. Knows no architecture.

A model takes tensor by tensor and hands each to its final owner, so at most one layer is held twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import safe_open

from kvrelay.errors import InvalidArgument, Unimplemented
from kvrelay.models.safetensors_files import read_tensors

_READABLE = {"F32", "F16", "BF16"}


class Checkpoint:
    """The weights of one model; a context manager, since it keeps its files mapped while open."""

    def __init__(self, directory: Path, dtype: torch.dtype) -> None:
        self._directory = directory
        self._dtype = dtype
        self._tensors = read_tensors(directory)
        self._files: dict[Path, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.clear()
        self._stack.close()

    def check(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        """Every expected tensor is there, in its shape and in a dtype we read; InvalidArgument names the first not."""
        for name, shape in expected.items():
            info = self._tensors.get(name)
            if info is None:
                raise InvalidArgument(f"{self._directory}: tensor {name} is missing", field="model")
            if info.shape != shape:
                found, wanted = list(info.shape), list(shape)
                raise InvalidArgument(
                    f"{info.file}: tensor {name} has shape {found}, config.json asks for {wanted}", field="model"
                )
            if info.dtype not in _READABLE:
                raise Unimplemented(f"{info.file}: tensor {name} of dtype {info.dtype} is not built yet", field="model")

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor that was checked, as memory of its own, in the checkpoint's dtype unless told otherwise."""
        return self.stacked([name], dtype)

    def stacked(self, names: Sequence[str], dtype: torch.dtype | None = None) -> torch.Tensor:
        """Tensors one below the other along their first axis (q, k and v as one matrix), copied once."""
        shapes = [self._tensors[name].shape for name in names]
        result = torch.empty((sum(shape[0] for shape in shapes), *shapes[0][1:]), dtype=dtype or self._dtype)
        start = 0
        for name, shape in zip(names, shapes, strict=True):
            result[start : start + shape[0]].copy_(self._mapped(name))
            start += shape[0]
        return result

    def _mapped(self, name: str) -> torch.Tensor:
        file = self._tensors[name].file
        if file not in self._files:
            self._files[file] = self._stack.enter_context(safe_open(file, framework="pt", device="cpu"))
        tensor: torch.Tensor = self._files[file].get_tensor(name)
        return tensor
