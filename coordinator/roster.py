"""The workers of this coordinator: the registry's decisions carried out, sessions, loads. Knows no requests.

Everything runs on one event loop. Announcements come in, sessions come and go, and `RosterOwner` hears of reports,
losses and of every change that may let the router place something.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Coroutine
from typing import Any, Protocol

import structlog

from coordinator import registry as rg
from coordinator.cached_blocks import CachedBlocks
from coordinator.clock_offset import Offset
from coordinator.loads import WorkerLoad
from coordinator.session_wire import Dial, ListBlocks, dial_worker, list_blocks
from coordinator.sessions import WorkerSession
from coordinator.stuck import Stuck
from coordinator.views import Share, Snapshot
from kvrelay.errors import KVRelayError, NotFound, Resource
from kvrelay.fault_points import fault_point
from kvrelay.requests import Incarnation, RequestId, Role, WorkerId
from kvrelay.session import Command, Load, Report, WorkerDescription

log = structlog.get_logger("coordinator.roster")

TICK_S = 0.2


class RosterOwner(Protocol):
    """Called on the event loop; must not block or raise."""

    def on_report(self, worker: WorkerId, report: Report) -> None: ...

    def on_worker_lost(self, worker: WorkerId, why: str) -> None: ...

    def on_change(self) -> None: ...


class Roster:
    def __init__(
        self,
        coordinator_id: str,
        served: rg.Served,
        dial: Dial = dial_worker,
        list_blocks: ListBlocks = list_blocks,
        wants_steps: bool = False,
    ) -> None:
        self.coordinator_id = coordinator_id
        self.owner: RosterOwner | None = None
        self._state = rg.Registry(served)
        self._limit: int = served.model.max_context
        """The context limit when every role seen so far was last up: who waits for one that went is held to it."""
        self._roles_seen: set[Role] = set()
        self._sessions: dict[WorkerId, WorkerSession] = {}
        self._loads: dict[WorkerId, WorkerLoad] = {}
        self._cached = CachedBlocks(list_blocks)
        self._stuck = Stuck()
        self._dial_worker = dial
        self._wants_steps = wants_steps
        self._serial = 0
        self._tasks: set[asyncio.Task[Any]] = set()

    # what others ask

    @property
    def context_limit(self) -> int:
        return min(self._limit, rg.context_limit(self._state))

    @property
    def block_size(self) -> int:
        return next((d.layout.block_size for d in self._state.up), 0)

    @property
    def caches(self) -> bool:
        """Whether any worker keeps blocks of requests that ended."""
        return any(d.prefix_cache for d in self._state.up)

    def has(self, role: Role) -> bool:
        """Whether a worker of this role has a session. One that drains counts: its successor is waited for after it.

        One that has been unwell for long does not.
        """
        workers = [load.description for load in self._loads.values()]
        return any(about.role is role and not self._stuck.is_given_up(about) for about in workers)

    def is_usable(self, role: Role) -> bool:
        """Whether a worker of this role takes requests now: it is heard of, well, and not about to go."""
        leaving = {w for w, known in self._state.workers.items() if known.leaving}
        return any(
            load.takes_requests(worker in leaving or self._sessions[worker].silent_s() > rg.STALLED_S)
            for worker, load in self._loads.items()
            if load.description.role is role
        )

    def listing(self) -> list[tuple[WorkerDescription, Load | None, float]]:
        """(description, last load, seconds of silence) of all workers with a session, by id.

        Metrics are read by another thread: one whose session is just ending is left out.
        """
        pairs = [(self._sessions.get(w), load) for w, load in sorted(self._loads.items())]
        return [(load.description, load.load, session.silent_s()) for session, load in pairs if session is not None]

    def clock_of(self, worker: WorkerId) -> Offset | None:
        """How far its clock is from ours; None before it is known."""
        session = self._sessions.get(worker)
        return None if session is None else session.clock.best()

    def snapshot(self) -> Snapshot:
        leaving = {w for w, known in self._state.workers.items() if known.leaving}
        prefill, decode = [], []
        for worker, load in self._loads.items():
            silent = self._sessions[worker].silent_s() > rg.STALLED_S
            if load.description.role is Role.PREFILL:
                gone = worker in leaving or self._stuck.is_given_up(load.description)
                prefill.append(load.prefill_view(silent, gone))
            else:
                decode.append(load.decode_view(silent or worker in leaving))
        return Snapshot(tuple(prefill), tuple(decode), self._cached.index, self._serial)

    # what requests do to workers

    def send(self, worker: WorkerId, command: Command) -> None:
        """Void if the worker has no session: its end has been or will be told."""
        if worker in self._loads:
            self._sessions[worker].send(command)

    def drain(self, worker: WorkerId, command: Command) -> None:
        """NotFound, naming those there are, if there is no such worker with a session."""
        if worker not in self._loads:
            known = ", ".join(sorted(self._loads)) or "none"
            raise NotFound(
                f"no worker {worker!r} has a session here; there are: {known}",
                field="worker_id",
                resource=Resource("worker", worker),
            )
        self._sessions[worker].send(command)

    def assign(self, worker: WorkerId, request_id: RequestId, share: Share) -> None:
        if worker in self._loads:
            self._serial += 1
            self._loads[worker].assign(request_id, share, self._serial)

    def sent(self, worker: WorkerId, request_id: RequestId) -> None:
        if worker in self._loads:
            self._loads[worker].sent(request_id)

    def answered(self, worker: WorkerId, request_id: RequestId) -> None:
        if worker in self._loads:
            self._loads[worker].answered(request_id)

    def release(self, worker: WorkerId, request_id: RequestId) -> None:
        if worker in self._loads:
            self._loads[worker].release(request_id)

    # life

    async def run(self) -> None:
        """Ticks until cancelled; then hangs up everywhere."""
        try:
            while True:
                await asyncio.sleep(TICK_S)
                fault_point("coordinator.roster")
                self._step(rg.Tick())
                self._stuck.keep(known.description for known in self._state.workers.values())
        finally:
            sessions = list(self._sessions.values())
            self._sessions.clear()
            self._loads.clear()
            await self._cached.close()
            await asyncio.gather(*(s.close() for s in sessions), *self._tasks, return_exceptions=True)

    def announced(self, description: WorkerDescription) -> None:
        """Raises what does not pair, and what is known under the same id and lives."""
        worker = description.worker_id
        silent_s = self._sessions[worker].silent_s() if worker in self._loads else None
        self._step(rg.Announced(description, silent_s))

    def leaving(self, worker: WorkerId, incarnation: Incarnation) -> None:
        self._step(rg.Leaving(worker, incarnation))
        self._changed()

    # SessionOwner

    def session_up(self, session: WorkerSession, welcome: WorkerDescription) -> None:
        with contextlib.suppress(KVRelayError):
            self._step(rg.SessionUp(session.dialled, welcome))
        if self._sessions.get(welcome.worker_id) is not session:
            return
        self._loads[welcome.worker_id] = WorkerLoad(welcome)
        self._cached.up(welcome)
        log.info("worker up", worker=welcome.worker_id, role=welcome.role.value, address=welcome.address)
        self._changed()

    def session_report(self, session: WorkerSession, report: Report) -> None:
        worker = session.description.worker_id
        load = self._loads.get(worker)
        if load is None or self._sessions.get(worker) is not session:
            return
        if report.load is not None:
            load.reported(report.load)
            if self._stuck.heard(load.description, report.load, time.monotonic()):
                self._spawn(session.close())
                self.session_down(session, "it is stuck: nothing moves there")
                return
        self._cached.heard(worker, report.block_events)
        if self.owner is not None:
            self.owner.on_report(worker, report)

    def session_down(self, session: WorkerSession, why: str) -> None:
        worker = session.description.worker_id
        if self._sessions.get(worker) is not session:
            return
        known = self._state.workers.get(worker)
        if known is not None and known.leaving:
            why = f"it left: {why}"
        del self._sessions[worker]
        self._step(rg.SessionDown(worker, session.description.incarnation))
        self._lost(worker, why)

    # inside

    def _lost(self, worker: WorkerId, why: str) -> None:
        """Requests hear of it before anything is placed anew."""
        if self._loads.pop(worker, None) is None:
            log.info("dial failed", worker=worker, why=why)
            return
        self._cached.lost(worker)
        log.warning("worker lost", worker=worker, why=why)
        if self.owner is not None:
            self.owner.on_worker_lost(worker, why)
        self._changed()

    def _changed(self) -> None:
        if self.owner is not None:
            self.owner.on_change()

    def _step(self, event: rg.Event) -> None:
        self._state, actions = rg.step(self._state, event, time.monotonic())
        roles = {d.role for d in self._state.up}
        self._roles_seen |= roles
        if roles == self._roles_seen:
            self._limit = rg.context_limit(self._state)
        refusal: KVRelayError | None = None
        for action in actions:
            if isinstance(action, rg.Dial):
                self._dial(action.description)
            elif isinstance(action, rg.Hangup):
                self._hang_up(action)
            else:
                refusal = action.error
                log.warning("worker refused", worker=action.worker_id, field=refusal.field, why=refusal.message)
        if refusal is not None:
            raise refusal

    def _dial(self, description: WorkerDescription) -> None:
        worker = description.worker_id
        assert worker not in self._sessions, "one session per worker"
        self._sessions[worker] = WorkerSession(
            description, self.coordinator_id, self, self._dial_worker, self._wants_steps
        )
        self._sessions[worker].start()

    def _hang_up(self, action: rg.Hangup) -> None:
        session = self._sessions.get(action.worker_id)
        if session is None or action.incarnation not in (session.dialled, session.description.incarnation):
            return
        del self._sessions[action.worker_id]
        self._spawn(session.close())
        self._lost(action.worker_id, "replaced or refused")

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
