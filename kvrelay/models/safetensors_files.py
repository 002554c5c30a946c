"""Which safetensors files a model directory has and whether they are whole. Reads headers only, no tensor.

Every failure names the file: a half-downloaded model is refused before anything is loaded.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrelay.errors import InvalidArgument, NotFound

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies and what its header says; dtype in safetensors' own words (F32, BF16, ...)."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; NotFound or InvalidArgument names the file."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise NotFound(f"{path}: no such file", field="model") from None
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"{path}: not readable as JSON ({error})", field="model") from error
    if not isinstance(value, dict):
        raise InvalidArgument(f"{path}: must hold a JSON object, not {type(value).__name__}", field="model")
    return value


def weight_files(directory: Path) -> tuple[Path, ...]:
    """The safetensors files of a model, sorted by name; all of them exist."""
    if (directory / INDEX).exists():
        return _indexed_files(directory)
    if (directory / SINGLE).is_file():
        return (directory / SINGLE,)
    hint = "; only safetensors weights are read" if any(directory.glob("*.bin")) else ""
    raise NotFound(f"{directory}: no weights, neither {SINGLE} nor {INDEX}{hint}", field="model")


def _indexed_files(directory: Path) -> tuple[Path, ...]:
    weight_map = read_json(directory / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InvalidArgument(f"{directory / INDEX}: weight_map is missing or empty", field="model")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name:
            raise InvalidArgument(
                f"{directory / INDEX}: weight_map names {name!r} outside the directory", field="model"
            )
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise NotFound(f"{directory}: half downloaded, {', '.join(missing)} of {INDEX} is missing", field="model")
    return tuple(directory / name for name in names)


def read_tensors(directory: Path) -> dict[str, TensorInfo]:
    """Every tensor of a model by name, from the headers of its files; each file is as long as its header says."""
    tensors: dict[str, TensorInfo] = {}
    for file in weight_files(directory):
        tensors.update(_read_header(file))
    return tensors


def _read_header(file: Path) -> dict[str, TensorInfo]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
            raise InvalidArgument(f"{file}: half downloaded or no safetensors file ({size} bytes)", field="model")
        raw = stream.read(length)
    try:
        header = json.loads(raw)
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        tensors = {n: TensorInfo(file, e["dtype"], tuple(int(d) for d in e["shape"])) for n, e in entries.items()}
        expected = 8 + length + int(end)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise InvalidArgument(f"{file}: its safetensors header is damaged ({error})", field="model") from error
    if size < expected:
        raise InvalidArgument(f"{file}: half downloaded, {size} of {expected} bytes", field="model")
    return tensors
