"""Does the suite turn red when a fault that systems like this one had is put back in?

    python bench/mutants.py                               every known fault; 60 seeds of the simulator each at most
    python bench/mutants.py --only skip-fence --seeds 200 one fault, more seeds
    python bench/mutants.py --list                        the faults in words; fails if one does not apply any more
    python bench/mutants.py --json                        for programs

Each fault goes into a copy of the packages in a temporary folder, never into this tree. There the simulator runs seed
after seed until its first violation, and the fast unit tests concerned until their first failure. Both are told, for
what the simulator finds without knowing where to look matters most. An unchanged copy, the control, must be green.
Exit 1 if a fault survives both, if the control is not green, or if a fault does not apply.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from known_fault import Fault
from known_faults_bounds import BOUNDS_FAULTS
from known_faults_handoff import HANDOFF_FAULTS
from known_faults_life import LIFE_FAULTS
from known_faults_memory import MEMORY_FAULTS

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("kvrelay", "coordinator", "worker", "prefill_svc", "decode_svc", "kvtransfer", "engine", "sim")
COPIED = (*PACKAGES, "tests", "pyproject.toml")
FAULTS: tuple[Fault, ...] = (*HANDOFF_FAULTS, *LIFE_FAULTS, *MEMORY_FAULTS, *BOUNDS_FAULTS)
CONTROL = Fault("control", "nothing is changed", ())
TABLES = tuple(
    f"tests/kvtransfer/test_{name}.py"
    for name in ("receiver_table", "writer_table", "handoff_times", "stuck_writes", "grpc_transport")
)
HANDOFF = (*TABLES, "tests/worker", "tests/kvtransfer/test_handoff_random.py")
COORDINATOR = (
    *("lifecycle", "moves", "live", "other_placement", "forks", "router", "router_caches", "router_chance"),
    *("cached_blocks", "worker_registry", "worker_side", "admission", "waiting", "steps_heard", "readiness"),
    *("prefix_index", "lifecycle_random", "forks_random", "stuck_workers", "bugs", "telling"),
)
"""Its tests without most doors: those are about requests, texts and connections, which no known fault touches."""
UNIT_TESTS = {
    "kvtransfer": HANDOFF,
    "decode_svc": ("tests/decode_svc", "tests/worker"),
    "prefill_svc": ("tests/prefill_svc", "tests/worker"),
    "worker": ("tests/worker",),
    "engine": (
        *(f"tests/engine/test_{name}.py" for name in ("scheduler", "block_pool", "prefix_cache")),
        *(f"tests/engine/test_{name}.py" for name in ("shared_prompts", "swapping", "cached_prompts")),
        "tests/worker",
        "tests/engine/test_small_pools.py",
    ),
    "coordinator": tuple(f"tests/coordinator/test_{name}.py" for name in COORDINATOR),
    "kvrelay": ("tests/kvrelay/test_liveness.py", "tests/kvrelay/test_report.py", *HANDOFF),
}
"""The fast tests that a change of a package concerns, the fastest first; the control runs all of them."""
FIRST_SEEDS, MORE_SEEDS = 5, 10
"""Seeds of the first and of each further run: most faults are found at once, and a run costs a second to start."""
ROW_CHARS = 150
CPU_S, NO_END_S = 300, 1800.0
"""Processor time and time that a run may take. One that needs more hangs, which is one way of being found."""
MEMORY_BYTES = 16 << 30
"""Of address space: a fault that makes something grow without end must not take the machine with it."""
IMPORTED = "import {0}\nfor module in ({0},): print(module.__name__, module.__file__)"

_running: set[subprocess.Popen[str]] = set()


class DoesNotApply(Exception):
    """The text a fault replaces is not there exactly once, or what comes of it is no Python: it would prove nothing."""


@dataclass
class Verdict:
    """sim: the violation, '' if there was none in num_seeds seeds. unit: the test that failed, '' if none did."""

    name: str
    what: str
    sim: str = ""
    seed: int | None = None
    num_seeds: int = 0
    sim_s: float = 0.0
    unit: str = ""
    unit_s: float = 0.0

    @property
    def found(self) -> bool:
        return bool(self.sim or self.unit)


# one fault


def mutated(fault: Fault, root: Path) -> dict[str, str]:
    """The new contents of the files that the fault changes, by path. Raises DoesNotApply."""
    contents: dict[str, str] = {}
    for edit in fault.edits:
        text = contents.get(edit.path) or (root / edit.path).read_text()
        count = text.count(edit.old)
        if count != 1:
            raise DoesNotApply(f"{fault.name}: its text occurs {count} times in {edit.path}:\n{edit.old}")
        contents[edit.path] = text.replace(edit.old, edit.new)
    for path, text in contents.items():
        try:
            compile(text, path, "exec")
        except SyntaxError as error:
            raise DoesNotApply(f"{fault.name}: {path} is no Python with it: {error}") from error
    return contents


def judged(fault: Fault, original: Path, num_seeds: int) -> Verdict:
    """Both halves of the suite on a copy of `original` with the fault in it."""
    with tempfile.TemporaryDirectory(prefix="kvrelay-mutant-") as folder:
        copy = Path(folder)
        shutil.copytree(original, copy, dirs_exist_ok=True)
        for path, text in mutated(fault, original).items():
            (copy / path).write_text(text)
        _require_own_code(copy)
        verdict = Verdict(fault.name, fault.what)
        began = time.monotonic()
        _simulate(copy, num_seeds, verdict)
        verdict.sim_s = time.monotonic() - began
        began = time.monotonic()
        verdict.unit = _unit_tests(copy, fault)
        verdict.unit_s = time.monotonic() - began
    return verdict


def _require_own_code(copy: Path) -> None:
    """What the runs below import must be the copy, not the tree that is installed in this environment."""
    done = _run(copy, "-c", IMPORTED.format(", ".join(PACKAGES)))
    if done is None or done.returncode:
        raise RuntimeError(f"the packages cannot be imported from {copy}: {done and done.stderr}")
    for line in done.stdout.splitlines():
        name, path = line.split(" ", 1)
        if not Path(path).resolve().is_relative_to(copy.resolve()):
            raise RuntimeError(f"{name} is imported from {path}, not from {copy}")


def _simulate(copy: Path, num_seeds: int, verdict: Verdict) -> None:
    """Runs seeds 0, 1, 2, ... up to the first violation, or num_seeds of them."""
    while verdict.num_seeds < num_seeds:
        first = verdict.num_seeds
        size = min(MORE_SEEDS if first else FIRST_SEEDS, num_seeds - first)
        args = ("-m", "sim", "--first", str(first), "--seeds", str(size), "--jobs", "1", "--json")
        done = _run(copy, *args)
        verdict.num_seeds = first + size
        if done is None:
            verdict.sim = f"a seed of {first}..{first + size - 1} does not end within {CPU_S} s of processor time"
            return
        try:
            violations = json.loads(done.stdout.splitlines()[-1])["violations"]
        except (IndexError, ValueError, KeyError):
            verdict.sim = f"it does not run: {_last_line(done.stderr)}"
            return
        if violations:
            worst = min(violations, key=lambda v: v["seed"])
            verdict.seed, verdict.sim, verdict.num_seeds = worst["seed"], worst["what"], worst["seed"] + 1
            return


def _unit_tests(copy: Path, fault: Fault) -> str:
    """The first test that fails, or ''."""
    packages = dict.fromkeys(edit.path.split("/")[0] for edit in fault.edits) or UNIT_TESTS
    tests = dict.fromkeys(path for package in packages for path in UNIT_TESTS[package])
    done = _run(copy, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=no", *tests)
    if done is None:
        return f"no end within {CPU_S} s of processor time"
    if done.returncode == 0:
        return ""
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return failed.group(1) if failed else f"exit {done.returncode}: {_last_line(done.stdout + done.stderr)}"


def _run(copy: Path, *args: str) -> subprocess.CompletedProcess[str] | None:
    """This environment's Python with `args`, importing from `copy`. None if it did not end in time."""
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONHASHSEED": "0", "HYPOTHESIS_STORAGE_DIRECTORY": "off"}
    process = subprocess.Popen(
        [sys.executable, *args],
        cwd=copy,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    _running.add(process)
    resource.prlimit(process.pid, resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.prlimit(process.pid, resource.RLIMIT_CPU, (CPU_S, CPU_S))
    try:
        out, err = process.communicate(timeout=NO_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return None
    finally:
        _running.discard(process)
    if process.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        return None
    return subprocess.CompletedProcess(args, process.returncode, out, err)


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1][:200] if lines else "nothing said"


# all of them


def verdicts(faults: Sequence[Fault], num_seeds: int, jobs: int) -> Iterator[Verdict]:
    """In the order given. The tree is copied once, so that nobody's edits come between two faults."""
    with tempfile.TemporaryDirectory(prefix="kvrelay-mutants-") as folder:
        original = Path(folder)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, original / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(source, original / name)
        for fault in faults:
            mutated(fault, original)
        with ThreadPoolExecutor(jobs) as threads:
            try:
                yield from threads.map(lambda fault: judged(fault, original, num_seeds), faults)
            finally:
                for process in list(_running):
                    process.kill()


def main() -> int:
    options = _parser().parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if not _all_apply():
        return 1
    if options.list:
        print("\n".join(f"{fault.name:32} {fault.what}" for fault in FAULTS))
        return 0
    faults = _chosen(options.only)
    if faults is None:
        return 1
    results = []
    for verdict in verdicts(faults, options.seeds, options.jobs):
        results.append(verdict)
        if not options.json:
            print(_row(verdict), flush=True)
    wrong = [v.name for v in results if v.found is (v.name == CONTROL.name)]
    if options.json:
        print(json.dumps({"results": [asdict(v) for v in results], "wrong": wrong}))
    else:
        print(_summary(results, wrong))
    return 1 if wrong else 0


def _all_apply() -> bool:
    """Says of each fault that does not apply why."""
    wrong = 0
    for fault in FAULTS:
        try:
            mutated(fault, ROOT)
        except DoesNotApply as error:
            print(error, file=sys.stderr)
            wrong += 1
    return not wrong


def _chosen(names: Sequence[str]) -> list[Fault] | None:
    known = {fault.name: fault for fault in (CONTROL, *FAULTS)}
    unknown = [name for name in names if name not in known]
    if unknown:
        print(f"no fault is called {', '.join(unknown)}; see --list", file=sys.stderr)
        return None
    return [known[name] for name in names] if names else list(known.values())


def _row(v: Verdict) -> str:
    seeds = f"{v.num_seeds} seed" + ("s" if v.num_seeds > 1 else "")
    sim = f"seed {v.seed}, after {seeds}: {v.sim[:ROW_CHARS]}" if v.seed is not None else v.sim or f"nothing in {seeds}"
    lines = (f"{v.name}: {v.what}", f"    simulator  {sim} ({v.sim_s:.0f} s)")
    return "\n".join((*lines, f"    unit tests {v.unit or 'green'} ({v.unit_s:.0f} s)"))


def _summary(results: Sequence[Verdict], wrong: Sequence[str]) -> str:
    faults = [v for v in results if v.name != CONTROL.name]
    by_sim, by_unit = sum(bool(v.sim) for v in faults), sum(bool(v.unit) for v in faults)
    found = sum(v.found for v in faults)
    line = f"{found} of {len(faults)} faults found: {by_sim} by the simulator, {by_unit} by unit tests"
    if any(v.name == CONTROL.name for v in results):
        line += "; control " + ("NOT GREEN" if CONTROL.name in wrong else "green")
    survivors = [name for name in wrong if name != CONTROL.name]
    return line + (f"\nsurvive: {', '.join(survivors)}" if survivors else "")


def _parser() -> argparse.ArgumentParser:
    words, examples = (__doc__ or "").split("\n\n", 1)
    parser = argparse.ArgumentParser(
        prog="python bench/mutants.py",
        description=words,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="only this one; may be repeated")
    parser.add_argument("--seeds", type=int, default=60, help="seeds of the simulator for each (default 60)")
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time (default 1)")
    parser.add_argument("--list", action="store_true", help="name them and say what each is")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())
