"""Where a local cluster's log lines and status line go: stderr, or files. Stdout stays for what programs read.

A line that cannot be written, as the disk is full or nobody reads any more, is lost and counted. It ends nothing:
whoever stopped reading a member's output would have that member wait for it.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from rich.live import Live


class Screen:
    """Prefixes lines with their process's name; on a terminal keeps one live status line below them."""

    def __init__(self, log_dir: str = "", quiet: bool = False) -> None:
        """quiet: drop the members' lines (their last ones are still told when one fails)."""
        self._dir = Path(log_dir) if log_dir else None
        self._quiet = quiet
        self._files: dict[str, IO[str]] = {}
        self._live: Live | None = None
        self.num_lost = 0

    def __enter__(self) -> Screen:
        if self._dir:
            self._dir.mkdir(parents=True, exist_ok=True)
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(stderr=True), transient=True, auto_refresh=False)
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._live:
            self._live.stop()
        for name in list(self._files):
            self._close(name)
        if self.num_lost:
            self.say(f"{self.num_lost} lines could not be written")

    @property
    def live(self) -> bool:
        """Whether a status line is shown."""
        return self._live is not None

    def log(self, name: str, line: str) -> None:
        """A line that the member `name` printed."""
        if self._dir:
            try:
                self._write(self._dir / f"{name}.log", name, line)
            except OSError:
                self.num_lost += 1
                self._close(name)  # with what it could not write; opened again with the next line
        elif not self._quiet:
            self._print(f"{name} | {line}")

    def _write(self, path: Path, name: str, line: str) -> None:
        if name not in self._files:
            self._files[name] = path.open("a", encoding="utf-8")
        self._files[name].write(line + "\n")
        self._files[name].flush()

    def _close(self, name: str) -> None:
        file = self._files.pop(name, None)
        with contextlib.suppress(OSError):
            if file is not None:
                file.close()

    def say(self, line: str) -> None:
        """A line of the supervisor itself."""
        self._print(f"kvrelay | {line}")

    def status(self, line: str) -> None:
        """Replace the live line; nothing where stderr is no terminal."""
        if self._live:
            from rich.text import Text

            self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)

    def _print(self, text: str) -> None:
        try:
            if self._live:
                self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)
            else:
                print(text, file=sys.stderr, flush=True)
        except OSError:
            self.num_lost += 1
