"""Constraints to grammars, in a process beside this one, one after another. Knows no requests.

What was compiled before is remembered, also that it could not be: most clients send one schema again and again.
"""

from __future__ import annotations

import asyncio
import json
import select
import signal
import subprocess
import sys
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import IO

from coordinator.constraints import Constraint, check_constraint
from coordinator.field_checks import wrong
from coordinator.trial import CPU_S, MEMORY_BYTES
from kvrelay.errors import InvalidArgument, ResourceExhausted, Unavailable, Unimplemented

MAX_WAITING = 32
MAX_REMEMBERED = 256
"""Of at most 64 KiB each, and their grammars."""
MAX_WAIT_S = 60.0
"""By the clock, for a process that starts, reads a tokenizer and uses all its processor time on a busy machine."""


class Compiling:
    """Owns a thread and, from the first constraint on, a process; `close` ends both."""

    def __init__(self, directory: str) -> None:
        """directory: where the model's tokenizer lies; empty: tokens are bytes."""
        self._directory = directory
        self._waiting = 0
        self._closed = False
        self._process: _Process | None = None
        self._known: OrderedDict[Constraint, str | InvalidArgument] = OrderedDict()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammars")

    async def grammar(self, constraint: Constraint) -> str:
        """What Sampling.grammar takes. InvalidArgument names the field; ResourceExhausted when too many wait."""
        check_constraint(constraint)
        outcome = self._known.get(constraint)
        if outcome is None:
            outcome = await self._in_thread(constraint)
            self._known[constraint] = outcome
            if len(self._known) > MAX_REMEMBERED:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(constraint)
        if isinstance(outcome, InvalidArgument):
            raise InvalidArgument(outcome.message, field=outcome.field)
        return outcome

    def close(self) -> None:
        """Does not wait for what is being compiled."""
        self._closed = True
        if self._process is not None:
            self._process.kill()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _in_thread(self, constraint: Constraint) -> str | InvalidArgument:
        if self._waiting >= MAX_WAITING:
            raise ResourceExhausted(f"{MAX_WAITING} grammars wait to be compiled", retry_after_s=1.0)
        self._waiting += 1
        job = asyncio.get_running_loop().run_in_executor(self._thread, self._compile, constraint)
        job.add_done_callback(self._one_less)
        return await asyncio.shield(job)

    def _one_less(self, _: object) -> None:
        self._waiting -= 1

    def _compile(self, constraint: Constraint) -> str | InvalidArgument:
        process = self._process or self._start()
        asked = {"kind": constraint.kind, "text": constraint.text, "choices": constraint.choices}
        try:
            process.stdin.write(json.dumps(asked).encode() + b"\n")
            process.stdin.flush()
            answer = _answer(process)
        except OSError:
            answer = None
        if answer is None:
            return self._fault(constraint, self._ended(process))
        grammar: str | None = answer.get("grammar")
        return InvalidArgument(answer["words"], field=answer["field"]) if grammar is None else grammar

    def _start(self) -> _Process:
        """Unavailable when it does not come up; Unimplemented when it cannot read the tokenizer."""
        command = [sys.executable, "-m", "coordinator.trial", self._directory]
        process = _Process(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        self._process = process
        if self._closed:
            process.kill()
        hello = _answer(process)
        if hello is None or hello:
            code = self._ended(process)
            if hello:
                raise Unimplemented(f"no constraints with this model: {hello['unready']}", field="constraint")
            raise Unavailable(f"the process that compiles grammars ended with {code} before it began")
        return process

    def _ended(self, process: _Process) -> int:
        """Its exit code; the next constraint gets another process."""
        self._process = None
        process.kill()
        process.stdin.close()
        process.stdout.close()
        return process.wait()

    def _fault(self, constraint: Constraint, code: int) -> InvalidArgument:
        """Why a constraint ended the process."""
        if self._closed:
            raise Unavailable("shutting down")
        if code == -signal.SIGPROF:
            words = f"takes more than {CPU_S:g} s of processor time to compile"
        else:
            words = f"is nested too deeply, or takes more than {MEMORY_BYTES >> 20} MiB to compile"
        return wrong(str(constraint.kind), words)


class _Process(subprocess.Popen[bytes]):
    """With both pipes."""

    stdin: IO[bytes]
    stdout: IO[bytes]


def _answer(process: _Process) -> dict[str, str] | None:
    """The next line; None if there will be none, or not in time."""
    ready = select.poll()
    ready.register(process.stdout, select.POLLIN | select.POLLHUP)
    line = process.stdout.readline() if ready.poll(MAX_WAIT_S * 1000) else b""
    answer: dict[str, str] | None = json.loads(line) if line.endswith(b"\n") else None
    return answer
