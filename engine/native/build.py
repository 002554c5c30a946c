"""Compiles the kernels with g++ at first use into a cache named by the hash of sources and flags. Loads nothing.

`python -m engine.native.build` builds now and says what it did. Without a compiler there is a reason, not an error.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parent
FLAGS = ("-O3", "-fPIC", "-fopenmp", "-std=c++17", "-fno-math-errno", "-ffp-contract=off")
# The wide sets only where they exist; which one runs is decided when the library is loaded.
X86_SETS = {"avx2": ("-DKVR_ISA=1", "-mavx2", "-mfma"), "avx512": ("-DKVR_ISA=2", "-mavx512f", "-mavx2", "-mfma")}
COMPILE_TIMEOUT_S = 300


@dataclass(frozen=True, slots=True)
class Built:
    """Where the library lies, or why there is none; `seconds` is 0 if it was there already."""

    path: Path | None
    detail: str
    seconds: float = 0.0


def instruction_sets() -> dict[str, tuple[str, ...]]:
    """Name of each instruction set compiled on this kind of machine -> its flags."""
    wide = X86_SETS if platform.machine() in {"x86_64", "AMD64"} else {}
    return {"generic": ("-DKVR_ISA=0",), **wide}


def cache_dir() -> Path:
    root = os.environ.get("KVRELAY_CACHE")
    return (Path(root) if root else Path.home() / ".cache" / "kvrelay") / "native"


def library_path() -> Path:
    """The file these sources and flags build, whether or not it exists."""
    digest = hashlib.sha256(repr((FLAGS, instruction_sets(), platform.machine())).encode())
    for source in sorted((*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h"))):
        digest.update(source.name.encode() + source.read_bytes())
    return cache_dir() / f"kernels-{digest.hexdigest()[:20]}.so"


def build() -> Built:
    """Return the library, compiling it unless it exists. Two processes at once: one compiles, the other waits."""
    path = library_path()
    if path.exists():
        return Built(path, f"native kernels: {path} (built before)")
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        return Built(None, "no native kernels: no C++ compiler (install g++ or set CXX)")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_suffix(".lock")):
            if path.exists():
                return Built(path, f"native kernels: {path} (built by another process)")
            start = time.perf_counter()
            _compile(compiler, path)
    except subprocess.CalledProcessError as error:
        return Built(None, f"no native kernels: {compiler} failed: {error.stderr.strip()[-2000:]}")
    except (OSError, subprocess.TimeoutExpired) as error:
        return Built(None, f"no native kernels: {error}")
    seconds = time.perf_counter() - start
    return Built(path, f"native kernels: {path} (built in {seconds:.1f} s)", seconds)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(compiler: str, path: Path) -> None:
    """Compile every instruction set at once and link; the library appears whole or not at all."""
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        units = {"cpu": ("cpu.cpp", ()), **{name: ("kernels.cpp", flags) for name, flags in instruction_sets().items()}}
        jobs = []
        for name, (source, flags) in units.items():
            output = f"{scratch}/{name}.o"
            jobs.append([compiler, *FLAGS, *flags, "-c", str(SOURCES / source), "-o", output])
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            list(pool.map(_run, jobs))
        linked = f"{scratch}/kernels.so"
        _run([compiler, "-shared", "-fopenmp", "-o", linked, *(job[-1] for job in jobs)])
        os.replace(linked, path)


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S)


if __name__ == "__main__":
    print(build().detail)
