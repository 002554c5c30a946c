"""One role's process, started by hand as on a host of its own: `kvrelay coordinator | prefill | decode`."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

READY_TIMEOUT_S = 60.0


class RoleProcess:
    """Started at once; `start` again after it ended gives a new incarnation. Logs go to a file of the directory.

    env: variables of the first life only, such as an order to die at a fault point.
    inside: a command that becomes the one after it (exec) in other surroundings, such as `ip netns exec NAME`.
    """

    def __init__(
        self,
        directory: Path,
        role: str,
        *flags: str,
        name: str = "",
        env: Mapping[str, str] | None = None,
        inside: Sequence[str] = (),
    ) -> None:
        self._command = [*inside, sys.executable, "-m", "kvrelay.cli.main", role, *flags]
        self.log = directory / f"{name or f'{role}-{len(list(directory.iterdir()))}'}.log"
        self.start(env=env)

    def start(self, *flags: str, env: Mapping[str, str] | None = None) -> None:
        """Returns once it said ready; `address` is what it said. flags, env: for this life, besides the first ones."""
        self.has_orders = bool(env)
        with self.log.open("a") as stderr:
            self._process = subprocess.Popen(
                [*self._command, *flags],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env={**os.environ, **(env or {})},
            )
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], READY_TIMEOUT_S)
        line = self._process.stdout.readline() if readable else ""
        if not line.startswith("ready "):
            self.kill()
            raise AssertionError(f"no ready line, got {line!r}\n{self.log.read_text()[-3000:]}")
        self.address = line.split()[1]

    @property
    def pid(self) -> int:
        return self._process.pid

    def terminate(self, within_s: float = 15.0) -> int:
        """SIGTERM; returns the exit code."""
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(within_s)

    def wait(self, within_s: float) -> int:
        """The exit code of a process that ends by itself."""
        return self._process.wait(within_s)

    def kill(self) -> None:
        """SIGKILL, and wait for the end. Nothing if it has ended already."""
        self._process.kill()
        self._process.wait(5)
        assert self._process.stdout is not None
        self._process.stdout.close()


@contextmanager
def role_process(directory: Path, role: str, *flags: str) -> Iterator[RoleProcess]:
    process = RoleProcess(directory, role, *flags)
    try:
        yield process
    finally:
        process.kill()
