"""The processes of a local cluster: starts, watches, restarts and ends them. Knows neither roles nor the wire.

1. `start` spawns every member in a process group of its own, so that Ctrl-C reaches only this process.
2. One task per member reads its output line by line, notices its end and asks `supervision` what to do.
3. `stop` sends SIGTERM, waits, sends SIGKILL. If this process dies first, the kernel kills the members (`parent`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvrelay.cli.supervision import GiveUp, Life, Restart, on_exit, started

STOP_GRACE_S = 12.0
LINE_LIMIT = 1024 * 1024
DRAIN_S = 1.0
"""How long the output of an ended process may still be read: a grandchild may hold its pipe open."""


@dataclass(frozen=True, slots=True)
class Member:
    """One process: its name in logs and its command line."""

    name: str
    argv: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Reached:
    """A process that said where it serves."""

    pid: int
    address: str


@dataclass(slots=True)
class _Running:
    """A member and its present process. ready: it said so on its stdout, and that it serves at `address`."""

    member: Member
    life: Life
    process: asyncio.subprocess.Process | None = None
    address: str = ""
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=20))


class Cluster:
    """Owns its members' processes from `start` to `stop`.

    log(name, line) gets each line a member prints; say(line) what the cluster itself has to tell.
    """

    def __init__(self, members: Sequence[Member], log: Callable[[str, str], None], say: Callable[[str], None]) -> None:
        self._running = [_Running(member, Life(member.name)) for member in members]
        self._log, self._say = log, say
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = asyncio.Event()
        self.served = False
        self.failure: asyncio.Future[GiveUp] = asyncio.get_running_loop().create_future()

    @property
    def pids(self) -> dict[str, int]:
        """Name -> process id of the members that live now."""
        alive = ((r.member.name, r.process) for r in self._running)
        return {name: process.pid for name, process in alive if process and process.returncode is None}

    @property
    def reached(self) -> dict[str, Reached]:
        """Members that live and said where they serve, by name."""
        return {
            r.member.name: Reached(r.process.pid, r.address)
            for r in self._running
            if r.process and r.process.returncode is None and r.ready.is_set()
        }

    def kill_silent(self, name: str, pid: int) -> None:
        """SIGKILL to the present process of a member, if it is still the one meant; it will be started again."""
        if self.pids.get(name) == pid:
            self._say(f"{name} is silent or stuck and gets killed")
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    async def start(self) -> None:
        self._tasks = [asyncio.create_task(self._keep(r), name=r.member.name) for r in self._running]
        for task in self._tasks:
            task.add_done_callback(self._on_task_done)

    async def until_ready(self, name: str) -> None:
        """Wait until that member's present process said that it is ready. The caller bounds it."""
        await next(r for r in self._running if r.member.name == name).ready.wait()

    def kill(self) -> None:
        """SIGKILL to all members, now."""
        self._stopping.set()
        self._signal(signal.SIGKILL)

    async def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """End every process: SIGTERM, at most `grace_s` of patience, SIGKILL. Returns when all are gone."""
        self._stopping.set()
        self._signal(signal.SIGTERM)
        pending = set(self._tasks)
        if pending:
            _, pending = await asyncio.wait(pending, timeout=grace_s)
        if pending:
            self._say(f"still running after {grace_s:g} s, killed: {', '.join(sorted(t.get_name() for t in pending))}")
            self._signal(signal.SIGKILL)
            for task in pending:
                task.cancel()
            await asyncio.wait(pending, timeout=grace_s)

    def _signal(self, number: signal.Signals) -> None:
        for running in self._running:
            if running.process and running.process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    running.process.send_signal(number)

    async def _keep(self, running: _Running) -> None:
        """Run one member, incarnation after incarnation, until the cluster stops or gives up."""
        while not self._stopping.is_set():
            running.life = started(running.life)
            began = time.monotonic()
            code = await self._run_once(running)
            if self._stopping.is_set():
                return
            last = running.last_lines[-1] if running.last_lines else ""
            running.life, decision = on_exit(running.life, code, time.monotonic() - began, self.served, last)
            match decision:
                case GiveUp():
                    if not self.failure.done():
                        self.failure.set_result(decision)
                    return
                case Restart():
                    self._say(decision.message)
                    await self._pause(decision.delay_s)

    async def _pause(self, delay_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), delay_s)

    async def _run_once(self, running: _Running) -> int:
        running.last_lines.clear()
        running.ready.clear()
        process = await asyncio.create_subprocess_exec(
            *running.member.argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            limit=LINE_LIMIT,
        )
        running.process = process
        if self._stopping.is_set():  # `stop` came while it was being started
            process.terminate()
        readers = [
            asyncio.create_task(self._read(running, stream)) for stream in (process.stdout, process.stderr) if stream
        ]
        try:
            code = await process.wait()
            await asyncio.wait(readers, timeout=DRAIN_S)
            return code
        finally:
            for reader in readers:
                reader.cancel()

    async def _read(self, running: _Running, stream: asyncio.StreamReader) -> None:
        while line := await _next_line(stream):
            text = line.decode("utf-8", "replace").rstrip()
            if text.startswith("ready "):
                running.address = text.split()[1]
                running.ready.set()
            else:
                running.last_lines.append(text)
                self._log(running.member.name, text)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) and not self.failure.done():
            self.failure.set_result(GiveUp(1, f"{task.get_name()} cannot be started: {error}"))


async def _next_line(stream: asyncio.StreamReader) -> bytes:
    """The next line, or as much of an endless one as the buffer holds; b"" at the end."""
    try:
        return await stream.readuntil(b"\n")
    except asyncio.IncompleteReadError as end:
        return end.partial
    except asyncio.LimitOverrunError as long:
        return await stream.read(max(long.consumed, 1))


def python_module(module: str, *arguments: str) -> tuple[str, ...]:
    """Command line that runs a module with this interpreter."""
    return (sys.executable, "-m", module, *arguments)
