"""The worker's end of its sessions: commands to the engine's mailbox, one merged report at a time back. No protos here.

The life of a session:
1. the coordinator says Hello; an older session of the same coordinator is ended first;
2. the engine is told SessionOpened, the coordinator gets a welcome;
3. commands go to the mailbox in order; reports are merged while one is being written, so the engine never waits;
4. it ends when either side closes it, after 10 s without a word, or when it goes unread for 10 s or 4 MiB;
   a worker that goes away says what is left to say first;
5. the engine is told SessionClosed: an abort for everything opened through it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

import structlog

from kvrelay.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument
from kvrelay.fault_points import fault_point
from kvrelay.liveness import Liveness
from kvrelay.requests import SessionId
from kvrelay.session import (
    HEARTBEAT_S,
    PROTOCOL_VERSION,
    WORKER_GIVES_UP_S,
    Command,
    Heartbeat,
    Hello,
    Load,
    Report,
    WorkerDescription,
)
from worker.events import CommandReceived, Event, SessionClosed, SessionOpened
from worker.mailbox import Mailbox
from worker.patience import within

log = structlog.get_logger("worker.session")

UNREAD_LIMIT_S = 10.0
UNREAD_LIMIT_ITEMS = 4 * 1024 * 1024 // 40
"""4 MiB of the smallest items (a token is about 40 bytes on the wire, and so is the key of a block event)."""
LAST_WORDS_S = 1.0
CHECK_S = 0.25

WriteReport = Callable[[Report], Awaitable[None]]


class _Session:
    """One open session: what waits to be written, and when the coordinator was last heard."""

    def __init__(self, session: SessionId, coordinator_id: str) -> None:
        self.id = session
        self.coordinator_id = coordinator_id
        self.pending: list[Report] = []
        self.num_items = 0
        self.something = asyncio.Event()
        self.closed = asyncio.Event()
        self.ended_because = ""
        self.heartbeat_seq = 0
        self.heartbeat_at_s = 0.0
        self.liveness = Liveness.start(WORKER_GIVES_UP_S, time.monotonic())
        self.unread = self.liveness
        self.write_bound: asyncio.Timeout | None = None
        self.has_last_words = False

    def put(self, report: Report) -> None:
        self.pending.append(report)
        self.num_items += len(report.tokens) + len(report.ended) + len(report.reserved) + len(report.refused)
        self.num_items += len(report.landed) + len(report.pushed) + len(report.records) + 2 * len(report.steps)
        self.num_items += sum(1 + events.next - events.first for events in report.block_events)
        if self.num_items > UNREAD_LIMIT_ITEMS:
            self.end("the coordinator does not read its reports")
        self.something.set()

    def take(self) -> Report | None:
        """Everything pending as one report, or None."""
        if not self.pending:
            return None
        merged = self.pending[0]
        for later in self.pending[1:]:
            merged = merged.merge(later)
        self.pending.clear()
        self.num_items = 0
        return merged

    def begin_write(self, bound: asyncio.Timeout) -> None:
        """`check` lets the bound run out when the write took too long."""
        self.unread = Liveness.start(LAST_WORDS_S if self.has_last_words else UNREAD_LIMIT_S, time.monotonic())
        self.write_bound = bound

    def check(self, now: float) -> None:
        """Every CHECK_S: is the coordinator silent, or does it read nothing?"""
        self.liveness, gone = self.liveness.check(now, CHECK_S)
        if gone:
            self.end(f"nothing heard for {WORKER_GIVES_UP_S:.0f} s")
        if self.write_bound is not None:
            self.unread, stuck = self.unread.check(now, CHECK_S)
            if stuck:
                self.write_bound.reschedule(asyncio.get_running_loop().time())
                self.write_bound = None

    def end_with(self, task: asyncio.Task[None]) -> None:
        """One of the session's own tasks died: then nobody reads its commands, or measures its silence."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.end(f"{type(error).__name__}: {error}")

    def end(self, why: str) -> None:
        if not self.ended_because:
            self.ended_because = why
        self.closed.set()
        self.something.set()


class SessionHub:
    """All sessions of a worker, on its event loop. healthy: said with every load, whoever made it."""

    def __init__(
        self,
        mailbox: Mailbox[Event],
        description: WorkerDescription,
        load: Callable[[], Load],
        healthy: Callable[[], bool] = lambda: True,
    ) -> None:
        self._mailbox = mailbox
        self._description = description
        self._load = load
        self._healthy = healthy
        self._sessions: dict[SessionId, _Session] = {}

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    def describe(self) -> tuple[WorkerDescription, Load]:
        return self._description, self._load()

    def send(self, session: SessionId, report: Report) -> None:
        """Queue a report; one for a session that has ended is dropped."""
        found = self._sessions.get(session)
        if found is not None:
            found.put(report)

    def end_all(self, why: str) -> None:
        """Each says what it has left to say, and ends. A coordinator that reads slowly gets LAST_WORDS_S for it."""
        for session in list(self._sessions.values()):
            session.has_last_words = True
            session.unread = Liveness.start(LAST_WORDS_S, time.monotonic())
            session.end(why)

    async def serve(self, commands: AsyncIterator[Command], write: WriteReport) -> None:
        """Run one session to its end. Raises FailedPrecondition or InvalidArgument when it cannot begin."""
        hello = await self._greet(commands)
        await self._end_older(hello.coordinator_id)
        session = _Session(hello.session_id, hello.coordinator_id)
        self._sessions[session.id] = session
        self._mailbox.post(SessionOpened(session.id, session.coordinator_id, hello.steps))
        tasks = [asyncio.ensure_future(self._read(session, commands)), asyncio.ensure_future(self._watch(session))]
        for task in tasks:
            task.add_done_callback(session.end_with)
        try:
            session.put(Report(welcome=self._description, load=self._load()))
            await self._write(session, write)
        finally:
            for task in tasks:
                task.cancel()
            self._sessions.pop(session.id, None)
            self._mailbox.post(SessionClosed(session.id), must=True)
            session.closed.set()
            await asyncio.gather(*tasks, return_exceptions=True)
            log.info("session ended", coordinator=session.coordinator_id, why=session.ended_because or "cancelled")
        for task in tasks:
            if task.done() and not task.cancelled() and task.exception() is not None:
                raise task.exception() or AssertionError

    @staticmethod
    async def _greet(commands: AsyncIterator[Command]) -> Hello:
        try:
            first = await within(WORKER_GIVES_UP_S, anext(commands))
        except StopAsyncIteration:
            raise InvalidArgument("the session ended before hello", field="command.hello") from None
        except TimeoutError:
            raise DeadlineExceeded(f"no hello within {WORKER_GIVES_UP_S:.0f} s", field="command.hello") from None
        if not isinstance(first, Hello):
            raise InvalidArgument("a session begins with hello", field="command.hello")
        if first.protocol_version != PROTOCOL_VERSION:
            raise FailedPrecondition(
                f"protocol_version differs: {PROTOCOL_VERSION} here, {first.protocol_version} there",
                field="protocol_version",
            )
        return first

    async def _end_older(self, coordinator_id: str) -> None:
        older = [s for s in self._sessions.values() if s.coordinator_id == coordinator_id]
        for session in older:
            session.end("a new session of the same coordinator began")
            self._sessions.pop(session.id, None)
            self._mailbox.post(SessionClosed(session.id), must=True)

    async def _read(self, session: _Session, commands: AsyncIterator[Command]) -> None:
        try:
            async for command in commands:
                fault_point("worker.command")
                session.liveness = session.liveness.heard(time.monotonic())
                if isinstance(command, Heartbeat):
                    session.heartbeat_seq, session.heartbeat_at_s = command.seq, time.monotonic()
                elif isinstance(command, Hello):
                    raise InvalidArgument("hello was already said", field="command.hello")
                else:
                    self._mailbox.post(CommandReceived(session.id, command))
            session.end("the coordinator closed it")
        except asyncio.CancelledError:
            raise
        except Exception as error:
            session.end(f"{type(error).__name__}: {error}")
            raise

    async def _watch(self, session: _Session) -> None:
        while True:
            await asyncio.sleep(CHECK_S)
            session.check(time.monotonic())

    async def _write(self, session: _Session, write: WriteReport) -> None:
        """Write merged reports, and a heartbeat with the load when there was nothing else for HEARTBEAT_S."""
        while not session.closed.is_set():
            try:
                async with asyncio.timeout(HEARTBEAT_S):  # wait_for may swallow a cancellation
                    await session.something.wait()
            except TimeoutError:
                session.put(Report(load=self._load()))
            session.something.clear()
            report = session.take()
            if report is not None:
                await self._write_one(session, report, write)
        report = session.take()
        if report is not None and session.has_last_words:
            await self._write_one(session, report, write)

    async def _write_one(self, session: _Session, report: Report, write: WriteReport) -> None:
        fault_point("worker.report")
        load = report.load
        stamped = replace(
            report,
            load=load if load is None or self._healthy() else replace(load, unwell=True),
            heartbeat_seq=session.heartbeat_seq,
            heartbeat_at_s=session.heartbeat_at_s,
            sent_at_s=time.monotonic(),
        )
        try:
            async with asyncio.timeout(None) as bound:
                session.begin_write(bound)
                await write(stamped)
        except TimeoutError:
            session.end(f"a report went unread for {session.unread.gives_up_s:.0f} s")
        finally:
            session.write_bound = None
