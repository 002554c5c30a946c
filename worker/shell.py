"""What a worker's parts meet in: the engine thread's actions go out here, the world's events go in. Knows no roles.

A dead engine thread, a dead transport, a dead task or an unsure memory ends the process at once, non-zero.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import structlog

from engine.executor import Executor
from kvrelay.config import WorkerConfig
from kvrelay.errors import KVRelayError
from kvrelay.requests import Incarnation
from kvrelay.rpc.server import RpcServer
from kvrelay.session import Load, ModelIdentity, WorkerDescription
from kvtransfer.actions import ExitProcess, Expect, Post, Reply, Send, Unexpect
from kvtransfer.transports.base import TransportEvent, WriteFailed
from kvtransfer.transports.grpc import GrpcTransport
from kvtransfer.transports.nixl import NixlTransport
from worker.block_lists import BlockLists
from worker.drain import DrainTimes
from worker.engine_thread import EngineThread
from worker.events import (
    Action,
    BlocksListed,
    Core,
    DrainAsked,
    DropPeer,
    Event,
    Leave,
    OpenLink,
    SendReport,
    TransportHappened,
)
from worker.mailbox import Mailbox
from worker.session_hub import SessionHub

log = structlog.get_logger("worker")

EXIT_BROKEN = 70


Transport = NixlTransport | GrpcTransport


class Links(Protocol):
    """The role's end of its links, on the event loop."""

    def deliver(self, action: Reply | Send | OpenLink | DropPeer) -> None: ...

    async def close(self) -> None: ...


@dataclass(slots=True)
class Shell:
    """What a role's main composes: everything here lives as long as the process."""

    config: WorkerConfig
    incarnation: Incarnation
    mailbox: Mailbox[Event]
    loop: asyncio.AbstractEventLoop
    stop: asyncio.Event
    peer_calls: concurrent.futures.ThreadPoolExecutor
    """One thread, for calls that wait for the transport: a peer is dropped and added in the order decided."""
    block_lists: BlockLists
    healthy: bool = True
    num_signals: int = 0
    exit_code: int = 0
    times: DrainTimes | None = None
    engine: EngineThread | None = None
    transport: Transport | None = None
    hub: SessionHub | None = None
    links: Links | None = None

    def load(self) -> Load:
        """The worker's load as of the engine's last turn."""
        assert self.engine is not None and self.engine.load is not None
        return self.engine.load

    def note_health(self, healthy: bool) -> None:
        """Coordinators hear of it with the next load of each session."""
        self.healthy = healthy

    def deliver(self, actions: list[Action]) -> None:
        """Called on the engine thread: transports take their actions here, the event loop gets the rest in one go."""
        rest: list[Action] = []
        for action in actions:
            if isinstance(action, Leave):  # may come before there is a transport
                self.loop.call_soon_threadsafe(self.leave, action.grace_s)
                continue
            assert self.transport is not None
            if isinstance(action, Post):
                self._post(action)
            elif isinstance(action, Expect):
                self.transport.expect(action.ticket)
            elif isinstance(action, Unexpect):
                self.transport.unexpect(action.epoch)
            elif isinstance(action, ExitProcess):
                self.die(RuntimeError(action.reason))
            else:
                rest.append(action)
        if rest:
            self.loop.call_soon_threadsafe(self._deliver_or_die, rest)

    def _post(self, action: Post) -> None:
        assert self.transport is not None
        part = action.part
        try:
            self.transport.post(part)
        except KVRelayError as error:
            failed = WriteFailed(part.peer, part.epoch, part.part, error.message, posted=False)
            self.mailbox.post(TransportHappened(failed))

    def _deliver_or_die(self, actions: list[Action]) -> None:
        """What is lost here nobody would miss but the one who waits for it."""
        try:
            self._deliver_on_loop(actions)
        except Exception as error:
            self.die(error)

    def _deliver_on_loop(self, actions: list[Action]) -> None:
        assert self.hub is not None and self.links is not None
        for action in actions:
            if isinstance(action, SendReport):
                self.hub.send(action.session, action.report)
            elif isinstance(action, BlocksListed):
                self.block_lists.deliver(action)
            elif isinstance(action, Reply | Send | OpenLink | DropPeer):
                self.links.deliver(action)

    def drop_peer(self, peer: Incarnation) -> None:
        """The transport lets go of a peer. On the event loop, as is what adds one."""
        assert self.transport is not None
        self.peer_calls.submit(self.transport.drop_peer, peer).add_done_callback(_say_failed)

    def on_transport_event(self, event: TransportEvent) -> None:
        self.mailbox.post(TransportHappened(event))

    def die(self, error: BaseException) -> None:
        """End the process now, from any thread: what it knows of its memory, or its progress, is no longer sure."""
        log.error("worker ends", why=f"{type(error).__name__}: {error}", exc_info=error)
        sys.stderr.flush()
        os._exit(EXIT_BROKEN)

    def leave(self, grace_s: float, code: int = 0) -> None:
        """Drain and end within grace_s, or sooner if told so before. On the event loop."""
        self.times = DrainTimes.of(grace_s, time.monotonic()).sooner(self.times)
        self.exit_code = self.exit_code or code
        self.stop.set()

    def on_signal(self) -> None:
        """The first one is a Drain; another one ends the wait."""
        self.num_signals += 1
        self.quit(0)

    def quit(self, code: int) -> None:
        """Stop in good order, with this exit code."""
        self.leave(self.config.drain_grace_s, code)
        self.mailbox.post(DrainAsked(self.config.drain_grace_s), must=True)

    def keep(self, task: asyncio.Future[None]) -> None:
        """A task that may be cancelled but must not die."""

        def ended(done: asyncio.Future[None]) -> None:
            if not done.cancelled() and (error := done.exception()) is not None:
                self.die(error)

        task.add_done_callback(ended)


class RoleMain(Protocol):
    """What differs between the roles. All but `build` run on the event loop."""

    identity: ModelIdentity

    def build(self, shell: Shell) -> tuple[Core, Executor]:
        """On the engine thread: executor, pool, scheduler, table, core."""
        ...

    def attach(self, shell: Shell, server: RpcServer, description: WorkerDescription, executor: Executor) -> None:
        """Set shell.hub and shell.links, add the role's services to the server."""
        ...


MakeTransport = Callable[[Shell, Executor], Transport]


def _say_failed(call: concurrent.futures.Future[None]) -> None:
    if not call.cancelled() and (error := call.exception()) is not None:
        log.error("the transport keeps a peer that is gone", exc_info=error)
