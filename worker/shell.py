"""The world around a role's core: event loop, engine thread, server, sessions, registration, signals, exit.

The life of a worker process:
1. load: model facts, then executor and core on the engine thread, then the transport over the executor's pool;
2. serve: bind, start the server, announce to every coordinator, say ready;
3. stop: on SIGTERM or SIGINT leave, let requests end for DRAIN_S, end sessions (an abort for what is left), let writes
   end, exit 0. A second signal ends the wait for requests.
A dead engine thread, a dead transport or an unsure memory ends the process at once, non-zero.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import structlog

from engine.executor import Executor
from kvrelay.config import WorkerConfig
from kvrelay.errors import KVRelayError
from kvrelay.requests import Incarnation, WorkerId
from kvrelay.rpc.process import settle
from kvrelay.rpc.server import RpcServer
from kvrelay.session import Load, ModelIdentity, WorkerDescription
from kvtransfer.actions import ExitProcess, Expect, Post, Reply, Send, Unexpect
from kvtransfer.transports.base import TransportEvent, WriteFailed
from kvtransfer.transports.grpc import GrpcTransport
from kvtransfer.transports.nixl import NixlTransport
from worker.engine_thread import EngineThread
from worker.events import Action, Core, DropPeer, Event, OpenLink, SendReport, TransportHappened
from worker.mailbox import Mailbox
from worker.registration import Registration
from worker.session_hub import SessionHub

log = structlog.get_logger("worker")

EXIT_CONFIG = 78
EXIT_BROKEN = 70
LOAD_TIMEOUT_S = 300.0
DRAIN_S = 8.0
"""How long requests may take to end once the worker was told to stop; less than what its supervisor waits."""
SETTLE_S = 0.2
"""Nothing to do for so long: what the coordinators sent before they heard that the worker leaves would be here."""
STOP_GRACE_S = 5.0
READY_CHECK_S = 0.5
STALLED_S = 10.0


Transport = NixlTransport | GrpcTransport


class Links(Protocol):
    """The role's end of its links, on the event loop."""

    def deliver(self, action: Reply | Send | OpenLink) -> None: ...

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
    hurry: bool = False
    exit_code: int = 0
    engine: EngineThread | None = None
    transport: Transport | None = None
    hub: SessionHub | None = None
    links: Links | None = None

    def load(self) -> Load:
        """The worker's load as of the engine's last turn."""
        assert self.engine is not None and self.engine.load is not None
        return self.engine.load

    def deliver(self, actions: list[Action]) -> None:
        """Called on the engine thread: transports take their actions here, the event loop gets the rest in one go."""
        assert self.transport is not None
        rest: list[Action] = []
        for action in actions:
            if isinstance(action, Post):
                self._post(action)
            elif isinstance(action, Expect):
                self.transport.expect(action.ticket)
            elif isinstance(action, Unexpect):
                self.transport.unexpect(action.epoch)
            elif isinstance(action, DropPeer):
                self.peer_calls.submit(self.transport.drop_peer, action.peer)
            elif isinstance(action, ExitProcess):
                self.die(RuntimeError(action.reason))
            else:
                rest.append(action)
        if rest:
            self.loop.call_soon_threadsafe(self._deliver_on_loop, rest)

    def _post(self, action: Post) -> None:
        assert self.transport is not None
        part = action.part
        try:
            self.transport.post(part)
        except KVRelayError as error:
            failed = WriteFailed(part.peer, part.epoch, part.part, error.message, posted=False)
            self.mailbox.post(TransportHappened(failed))

    def _deliver_on_loop(self, actions: list[Action]) -> None:
        assert self.hub is not None and self.links is not None
        for action in actions:
            if isinstance(action, SendReport):
                self.hub.send(action.session, action.report)
            elif isinstance(action, Reply | Send | OpenLink):
                self.links.deliver(action)

    def on_transport_event(self, event: TransportEvent) -> None:
        self.mailbox.post(TransportHappened(event))

    def die(self, error: BaseException) -> None:
        """End the process now, from any thread: what it knows of its memory, or its progress, is no longer sure."""
        log.error("worker ends", why=f"{type(error).__name__}: {error}", exc_info=error)
        sys.stderr.flush()
        os._exit(EXIT_BROKEN)

    def quit(self, code: int) -> None:
        """Stop in good order with this exit code; told again, without waiting for requests. On the event loop."""
        self.hurry = self.stop.is_set()
        self.exit_code = self.exit_code or code
        self.stop.set()


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


def run_shell(
    config: WorkerConfig, role: RoleMain, make_transport: MakeTransport, on_ready: Callable[[str], None]
) -> int:
    """Run a worker until it is told to stop; returns its exit code (0 good, 70 broken, 78 configuration)."""
    try:
        return asyncio.run(_main(config, role, make_transport, on_ready))
    except KVRelayError as error:
        log.error("cannot start", field=error.field, why=error.message)
        return EXIT_CONFIG


async def _main(
    config: WorkerConfig, role: RoleMain, make_transport: MakeTransport, on_ready: Callable[[str], None]
) -> int:
    loop = asyncio.get_running_loop()
    incarnation = Incarnation(secrets.token_hex(8))
    peer_calls = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="peers")
    shell = Shell(config, incarnation, Mailbox(), loop, asyncio.Event(), peer_calls)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, shell.quit, 0)
    # A stopped prefill worker answers no ping: closing its link would say that it is dead, and it may still write.
    server = RpcServer(keepalive=False)
    port = server.bind(config.listen)
    engine, executor = await _start_engine(shell, role)
    shell.transport = make_transport(shell, executor)
    description = _describe(shell, role, executor, port)
    role.attach(shell, server, description, executor)
    assert shell.hub is not None
    await server.start()
    await server.set_ready(True)
    registration = Registration(description, config.coordinators, lambda why: shell.quit(EXIT_CONFIG))
    watch = asyncio.ensure_future(_watch_progress(engine, server))
    settle()
    on_ready(description.address)
    log.info("serving", address=description.address, worker=description.worker_id, incarnation=incarnation)
    await shell.stop.wait()
    watch.cancel()
    await registration.leave()
    await _drain(shell, engine)
    await _stop(shell, server, engine)
    return shell.exit_code


async def _start_engine(shell: Shell, role: RoleMain) -> tuple[EngineThread, Executor]:
    built: list[Executor] = []

    def build() -> tuple[Core, Executor]:
        core, executor = role.build(shell)
        built.append(executor)
        return core, executor

    engine = shell.engine = EngineThread(build, shell.mailbox, shell.deliver, shell.die)
    started = asyncio.ensure_future(asyncio.to_thread(engine.start, LOAD_TIMEOUT_S))
    stop = asyncio.ensure_future(shell.stop.wait())
    await asyncio.wait((started, stop), return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    if not started.done():
        os._exit(0)  # told to stop while the model loads: nothing is served yet, nobody to tell
    await started
    return engine, built[0]


def _describe(shell: Shell, role: RoleMain, executor: Executor, port: int) -> WorkerDescription:
    config = shell.config
    host = config.listen.rpartition(":")[0]
    if not config.advertise and host in ("0.0.0.0", "[::]", ""):
        log.warning("peers cannot reach a wildcard address; set advertise", listen=config.listen)
    return WorkerDescription(
        worker_id=WorkerId(config.worker_id or f"{config.role}-{shell.incarnation[:6]}"),
        role=config.role,
        incarnation=shell.incarnation,
        pid=os.getpid(),
        address=config.advertise or f"{host}:{port}",
        model=role.identity,
        layout=executor.layout,
        num_blocks=executor.pool.num_blocks,
        transport=config.transport,
        executor=config.executor,
        max_sequences=config.max_sequences,
        step_tokens=config.step_tokens,
    )


async def _watch_progress(engine: EngineThread, server: RpcServer) -> None:
    """Ready means: the engine thread came round lately. It does so twice a second when idle."""
    ready = True
    while True:
        await asyncio.sleep(READY_CHECK_S)
        now_ready = time.monotonic() - engine.progress_at < STALLED_S
        if now_ready != ready:
            log.warning("readiness changed", ready=now_ready)
            ready = now_ready
            await server.set_ready(ready)


async def _drain(shell: Shell, engine: EngineThread) -> None:
    """Until no request has been here for SETTLE_S, or DRAIN_S are over. Without a session there is none to wait for."""
    assert shell.hub is not None
    ends_at = time.monotonic() + DRAIN_S
    idle_since = time.monotonic()
    while shell.hub.num_sessions and not shell.hurry:
        now = time.monotonic()
        idle_since = idle_since if _idle(engine) else now
        if now >= ends_at or now - idle_since >= SETTLE_S:
            return
        await asyncio.sleep(0.02)


def _idle(engine: EngineThread) -> bool:
    load = engine.load
    if load is None:
        return True
    return _quiet(engine) and load.waiting == load.blocks.held == load.blocks.reserved == 0


async def _stop(shell: Shell, server: RpcServer, engine: EngineThread) -> None:
    """Sessions end first (their requests are aborted), then engine and transport, and last the links."""
    assert shell.hub is not None and shell.links is not None and shell.transport is not None
    shell.hub.end_all("the worker is stopping")
    await _until(lambda: _quiet(engine), STOP_GRACE_S)
    await shell.loop.run_in_executor(None, engine.stop)
    shell.peer_calls.shutdown(wait=False, cancel_futures=True)
    await shell.loop.run_in_executor(None, shell.transport.close)
    await shell.links.close()
    await server.stop(1.0)


def _quiet(engine: EngineThread) -> bool:
    load = engine.load
    return load is None or (load.running == 0 and load.transfers_in_flight == 0)


async def _until(condition: Callable[[], bool], at_most_s: float) -> None:
    ends_at = time.monotonic() + at_most_s
    while not condition() and time.monotonic() < ends_at:  # noqa: ASYNC110  # the engine thread sets no event
        await asyncio.sleep(0.02)
