"""One session with one worker, from dial to end: commands down, reports up. Knows nothing of what they mean.

1. Dial, open the stream, say Hello; the worker answers with a report that holds its description (welcome).
2. Commands go down in order (cancels overtake those not yet sent); each report is handed up as it comes.
3. A heartbeat every 0.5 s. After 2.5 s without any report the worker is given up.
4. Whatever ends it, the call is cancelled and `on_down` is called once. A session is never resumed.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol
from uuid import uuid4

import structlog

from coordinator.clock_offset import ClockOffset
from coordinator.outbox import CommandOutbox
from coordinator.session_wire import Dial, SessionCall
from kvrelay.errors import FailedPrecondition, KVRelayError, Unavailable
from kvrelay.liveness import Liveness
from kvrelay.requests import SessionId
from kvrelay.session import (
    COORDINATOR_GIVES_UP_S,
    HEARTBEAT_S,
    Command,
    Heartbeat,
    Hello,
    Report,
    WorkerDescription,
)

log = structlog.get_logger("coordinator.session")


class SessionOwner(Protocol):
    """Who hears of a session. Called on the event loop; must not block."""

    def session_up(self, session: WorkerSession, welcome: WorkerDescription) -> None: ...

    def session_report(self, session: WorkerSession, report: Report) -> None: ...

    def session_down(self, session: WorkerSession, why: str) -> None: ...


class WorkerSession:
    """`start` once; `close` ends it and then `session_down` is not called."""

    def __init__(
        self,
        description: WorkerDescription,
        coordinator_id: str,
        owner: SessionOwner,
        dial: Dial,
        wants_steps: bool = False,
    ) -> None:
        self.description = description
        self.dialled = description.incarnation
        self.id = SessionId(uuid4().hex)
        self._coordinator_id = coordinator_id
        self._owner = owner
        self._dial = dial
        self._outbox = CommandOutbox()
        self._something = asyncio.Event()
        now = time.monotonic()
        self._window = Liveness.start(COORDINATOR_GIVES_UP_S, now)
        self._welcomed = False
        self._seq = 0
        self._wants_steps = wants_steps
        self.clock = ClockOffset()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"session {self.description.worker_id}")

    async def close(self) -> None:
        """Ends the session and waits until its call is cancelled."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def send(self, command: Command) -> None:
        """Queue a command. One for a session that has ended is void, like everything that went through it."""
        self._outbox.put(command)
        self._something.set()

    def silent_s(self) -> float:
        return self._window.silent_s(time.monotonic())

    async def _run(self) -> None:
        try:
            await self._talk()
            why = "the session ended"
        except asyncio.CancelledError:
            raise
        except KVRelayError as error:
            why = error.message
        except Exception as error:  # a bug of ours must end this session, not the process's other ones
            log.exception("session failed", worker=self.description.worker_id)
            why = f"{type(error).__name__}: {error}"
        self._owner.session_down(self, why)

    async def _talk(self) -> None:
        """Runs reader, writer and watch until the first of them ends; raises what it raised."""
        async with self._dial(self.description) as call:
            tasks = [
                asyncio.ensure_future(self._read(call)),
                asyncio.ensure_future(self._write(call)),
                asyncio.ensure_future(self._watch()),
            ]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in tasks:
                    if task.done():
                        task.result()
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, call: SessionCall) -> None:
        while (report := await call.read()) is not None:
            now = time.monotonic()
            self._window = self._window.heard(now)
            self.clock.heard(report.heartbeat_seq, report.heartbeat_at_s, report.sent_at_s, now)
            if not self._welcomed:
                self._welcome(report)
            self._owner.session_report(self, report)
        raise Unavailable("the worker ended the session")

    def _welcome(self, report: Report) -> None:
        if report.welcome is None:
            raise FailedPrecondition("the first report of a session holds no welcome", field="report.welcome")
        self._welcomed = True
        if report.welcome.worker_id != self.description.worker_id:
            raise FailedPrecondition(f"dialled {self.description.worker_id}, reached {report.welcome.worker_id}")
        self.description = report.welcome
        self._owner.session_up(self, report.welcome)

    async def _write(self, call: SessionCall) -> None:
        await call.write(Hello(self._coordinator_id, self.id, steps=self._wants_steps))
        while True:
            await self._something.wait()
            self._something.clear()
            while self._outbox:
                await call.write(self._outbox.pop())

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            now = time.monotonic()
            self._window, gone = self._window.check(now, HEARTBEAT_S)
            if gone:
                raise Unavailable(f"nothing heard for {COORDINATOR_GIVES_UP_S} s")
            if self._outbox.full:
                raise Unavailable("the worker does not read its commands")
            self._seq += 1
            self.clock.sent(self._seq, now)
            self.send(Heartbeat(self._seq, now))
