"""No process of ours forks once it runs: a copy of gRPC's threads and locks hangs. Read from the sources."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("coordinator", "decode_svc", "engine", "kvrelay", "kvtransfer", "prefill_svc", "worker")
FORKING = {
    "os.fork",
    "os.forkpty",
    "multiprocessing.Process",
    "multiprocessing.Pool",
    "multiprocessing.set_start_method",
    "ProcessPoolExecutor",
    "concurrent.futures.ProcessPoolExecutor",
}
"""What multiprocessing starts by itself, outside of a context, forks on Linux."""


def forks_in(source: str) -> Iterator[str]:
    """Calls that fork, as they are written. preexec_fn makes subprocess do it."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        called, arguments = ast.unparse(node.func), [ast.unparse(argument) for argument in node.args]
        context = called == "multiprocessing.get_context" and arguments != ["'spawn'"]
        if context or called in FORKING or any(keyword.arg == "preexec_fn" for keyword in node.keywords):
            yield ast.unparse(node)


def test_nothing_forks() -> None:
    files = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    assert len(files) > 200
    found = [f"{file.relative_to(ROOT)}: {call}" for file in files for call in forks_in(file.read_text())]
    assert found == []


def test_each_way_to_fork_is_found() -> None:
    for call in (
        "os.fork()",
        "subprocess.Popen(a, preexec_fn=f)",
        "multiprocessing.Process(target=f)",
        "multiprocessing.get_context()",
        "multiprocessing.get_context('fork')",
        "multiprocessing.set_start_method('fork')",
        "ProcessPoolExecutor()",
    ):
        assert list(forks_in(call)) == [call]
    for call in ("multiprocessing.get_context('spawn')", "context.Process(target=f)", "state.fork()", "fork(x)"):
        assert list(forks_in(call)) == []
