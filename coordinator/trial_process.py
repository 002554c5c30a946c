"""The process beside this one that compiles constraints: asked, waited for, replaced. Knows no loop and no clients.

Constraints are what clients write, and some end that process (coordinator.trial). What its own limits did is held
against the constraint that it was at; whatever else ended it says nothing of any constraint.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO

from coordinator.constraints import Constraint
from coordinator.field_checks import wrong
from coordinator.trial import CPU_S, TOO_BIG
from kvrelay.errors import InvalidArgument, Unavailable, Unimplemented

MAX_WAIT_S = 30.0
"""By the clock, for a process that starts and reads a tokenizer, or uses all its processor time, on a busy machine."""
TRIES = 2
_TOO_LONG = f"takes more than {CPU_S:g} s of processor time to compile"
_BY_CONSTRAINT = {
    -signal.SIGPROF: _TOO_LONG,
    -signal.SIGSEGV: TOO_BIG,
    -signal.SIGBUS: TOO_BIG,
    -signal.SIGABRT: TOO_BIG,
}
"""Ends that its limits make, by exit code: a stack that is full is SIGSEGV, memory that Rust does not get SIGABRT."""


class TrialProcess:
    """`compile` and `end` belong to one thread; `stop` may come from any."""

    def __init__(self, directory: str) -> None:
        """directory: where the model's tokenizer lies; empty: tokens are bytes. The first constraint starts it."""
        self._directory = directory
        self._stopped = False
        self._process: _Process | None = None
        self._unready = ""

    @property
    def pid(self) -> int | None:
        """Of the one that is kept for the next constraint."""
        process = self._process
        return None if process is None else process.pid

    def compile(self, constraint: Constraint) -> str:
        """What Sampling.grammar takes. InvalidArgument names the field; Unimplemented: not with this tokenizer.

        Unavailable: the process does not start, or was ended from outside, and so was the next.
        """
        asked = json.dumps({"kind": constraint.kind, "text": constraint.text, "choices": constraint.choices})
        code = 0
        for _ in range(TRIES):
            process = self._running()
            heard = _tell(process, asked)
            answer = _line(process) if heard else None
            if answer is not None:
                if "grammar" in answer:
                    return answer["grammar"]
                raise InvalidArgument(answer["words"], field=answer["field"])
            code = self.end()
            if heard and code in _BY_CONSTRAINT and not self._stopped:
                raise wrong(str(constraint.kind), _BY_CONSTRAINT[code])
        raise Unavailable(f"the process that compiles grammars ended with {code}")

    def stop(self) -> None:
        """For good: what is being compiled is Unavailable at once. `end` comes after it."""
        self._stopped = True
        process = self._process
        if process is not None:
            process.kill()

    def end(self) -> int:
        """Its exit code, 0 if there is none; the next constraint gets another process."""
        process, self._process = self._process, None
        if process is None:
            return 0
        process.kill()
        for pipe in (process.stdin, process.stdout):
            with suppress(OSError):  # what was not written yet goes nowhere
                pipe.close()
        return process.wait()

    def _running(self) -> _Process:
        """The one there is, or another in place of one that was ended while it had nothing to do."""
        if self._unready:
            raise Unimplemented(self._unready, field="constraint")
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.end()
        process = self._start()
        hello = _line(process)
        if hello is None:
            raise Unavailable(f"the process that compiles grammars ended with {self.end()} before it began")
        if hello:
            self.end()
            self._unready = f"no constraints with this model: {hello['unready']}"
            raise Unimplemented(self._unready, field="constraint")
        return process

    def _start(self) -> _Process:
        if self._stopped:
            raise Unavailable("shutting down")
        command = [sys.executable, "-m", "coordinator.trial", self._directory]
        try:
            process = _Process(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        except OSError as error:
            raise Unavailable(f"the process that compiles grammars does not start: {error.strerror}") from error
        self._process = process
        if self._stopped:  # `stop` may have come before it was there to be killed
            process.kill()
        return process


class _Process(subprocess.Popen[bytes]):
    """With both pipes."""

    stdin: IO[bytes]
    stdout: IO[bytes]


def _tell(process: _Process, asked: str) -> bool:
    """Whether it may have read all of it: a process that died first cannot have died of it."""
    with _in_time(process):
        try:
            process.stdin.write(asked.encode() + b"\n")
            process.stdin.flush()
        except OSError:
            return False
        return True


def _line(process: _Process) -> dict[str, str] | None:
    """Its next line; None if there will be none, or not in time."""
    with _in_time(process):
        line = process.stdout.readline()
    answer: dict[str, str] | None = json.loads(line) if line.endswith(b"\n") else None
    return answer


@contextmanager
def _in_time(process: _Process) -> Iterator[None]:
    """What takes too long ends the process; so a read or a write of its pipes, which no time bounds, ends too."""
    watch = threading.Timer(MAX_WAIT_S, process.kill)
    watch.daemon = True
    watch.start()
    try:
        yield
    finally:
        watch.cancel()
