"""What a supervisor does with lines that it cannot write: it loses them, says how many, and goes on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvrelay.cli.screen import Screen


class Full:
    """A stream that takes nothing."""

    def write(self, text: str) -> int:
        raise BrokenPipeError

    def flush(self) -> None:
        raise BrokenPipeError

    def isatty(self) -> bool:
        return False


def test_lines_for_a_full_disk_are_lost_and_counted_and_later_ones_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full = tmp_path / "a.log"
    full.symlink_to("/dev/full")
    with Screen(str(tmp_path)) as screen:
        for number in range(3):
            screen.log("a", f"{number}")
        screen.log("b", "other")
        assert screen.num_lost == 3
        full.unlink()  # there is room again
        screen.log("a", "3")
    assert (full.read_text(), (tmp_path / "b.log").read_text()) == ("3\n", "other\n")
    assert capsys.readouterr().err == "kvrelay | 3 lines could not be written\n"


def test_lines_that_nobody_reads_end_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Full())
    with Screen() as screen:
        screen.log("a", "1")
        screen.say("2")
        assert screen.num_lost == 2
