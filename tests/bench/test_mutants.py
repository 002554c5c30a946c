"""Known faults must still apply to the code as it is: one that does not would prove nothing about the suite."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))  # its scripts import each other as neighbours

from known_fault import Edit, Fault  # noqa: E402  # after the path
from mutants import DoesNotApply, mutated  # noqa: E402


def ask(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(BENCH / "mutants.py"), *args], capture_output=True, text=True, timeout=60, check=False
    )


def test_every_known_fault_applies_to_this_tree_and_is_listed() -> None:
    done = ask("--list")
    assert (done.returncode, done.stderr) == (0, "")
    names = [line.split()[0] for line in done.stdout.splitlines()]
    assert len(names) == len(set(names)) >= 40
    assert {"skip-fence", "free-at-lease-end", "count-instead-of-positions", "part-posted-twice"} <= set(names)


def test_a_fault_that_nobody_knows_is_refused_by_name() -> None:
    done = ask("--only", "no-such-fault")
    assert (done.returncode, done.stderr) == (1, "no fault is called no-such-fault; see --list\n")


def test_edits_of_one_file_are_made_one_after_another(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\ny = 2\n")
    fault = Fault("two", "", (Edit("a.py", "x = 1", "x = 3"), Edit("a.py", "y = 2", "y = 4")))
    assert mutated(fault, tmp_path) == {"a.py": "x = 3\ny = 4\n"}
    assert (tmp_path / "a.py").read_text() == "x = 1\ny = 2\n"


@pytest.mark.parametrize(("text", "count"), [("x = 2\n", 0), ("x = 1\nx = 1\n", 2)])
def test_an_edit_whose_text_is_not_there_exactly_once_fails_loudly(tmp_path: Path, text: str, count: int) -> None:
    (tmp_path / "a.py").write_text(text)
    with pytest.raises(DoesNotApply, match=f"its text occurs {count} times in a.py"):
        mutated(Fault("one", "", (Edit("a.py", "x = 1", "x = 3"),)), tmp_path)


def test_an_edit_that_leaves_no_python_fails_loudly(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    with pytest.raises(DoesNotApply, match=r"one: a.py is no Python with it: invalid syntax \(a.py, line 1\)"):
        mutated(Fault("one", "", (Edit("a.py", "x = 1", "else: 1"),)), tmp_path)
