"""The life of a worker process, from configuration to exit code: event loop, signals, server, registration.

1. load: model facts, then executor and core on the engine thread, then the transport over the executor's pool;
2. serve: bind, start the server, announce to every coordinator, say ready;
3. drain: on SIGTERM, SIGINT or a coordinator's Drain it says goodbye, and the core gives back what it has not begun;
   what it has may end until the grace is nearly over, then the rest is moved (worker.drain);
4. stop: sessions end, then writes, engine, transport, links; exit 0. A second signal ends the wait of 3.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import secrets
import signal
import time
from collections.abc import Callable
from dataclasses import replace

from engine.executor import Executor
from kvrelay.config import WorkerConfig
from kvrelay.errors import FailedPrecondition, KVRelayError
from kvrelay.requests import Incarnation, WorkerId
from kvrelay.rpc.process import settle
from kvrelay.rpc.server import RpcServer
from kvrelay.session import WorkerDescription
from kvrelay.telemetry.metrics import MetricsServer
from kvrelay.telemetry.worker_metrics import load_metrics
from worker.block_lists import BlockLists
from worker.drain import Leaving, is_quiet
from worker.engine_thread import EngineThread
from worker.events import Core, Event
from worker.health import watch
from worker.mailbox import Mailbox
from worker.registration import Registration
from worker.shell import MakeTransport, RoleMain, Shell, log

EXIT_FAILED = 1
EXIT_CONFIG = 78
LOAD_TIMEOUT_S = 300.0
STOP_GRACE_S = 5.0
"""How long writes may take to end once the sessions have, at most and if the grace allows it."""
LEAST_STOP_S = 0.3
LOOK_S = 0.02


def run_shell(
    config: WorkerConfig, role: RoleMain, make_transport: MakeTransport, on_ready: Callable[[str], None]
) -> int:
    """Run a worker until it is told to stop. Its exit code: 0 good, 1 port taken, 70 broken, 78 configuration."""
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
    mailbox: Mailbox[Event] = Mailbox()
    shell = Shell(config, incarnation, mailbox, loop, asyncio.Event(), peer_calls, BlockLists(mailbox))
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, shell.on_signal)
    # A stopped prefill worker answers no ping: closing its link would say that it is dead, and it may still write.
    server = RpcServer(keepalive=False)
    try:
        port = server.bind(config.listen)
    except FailedPrecondition as error:
        log.error("cannot start", field=error.field, why=error.message)
        return EXIT_FAILED
    engine, executor = await _start_engine(shell, role)
    transport = shell.transport = make_transport(shell, executor)
    description = _describe(shell, role, executor, port)
    role.attach(shell, server, description, executor)
    assert shell.hub is not None
    metrics = _serve_metrics(shell, description)
    await server.start()
    await server.set_ready(True)
    registration = Registration(
        description, config.coordinators, lambda why: shell.quit(EXIT_CONFIG), on_death=shell.die
    )
    health = asyncio.ensure_future(
        watch(engine, server, shell.stop.is_set, shell.note_health, lambda: transport.hangs_s)
    )
    shell.keep(health)
    settle()
    on_ready(description.address)
    log.info("serving", address=description.address, worker=description.worker_id, incarnation=incarnation)
    await shell.stop.wait()
    await server.set_ready(False)
    goodbye = asyncio.ensure_future(registration.leave())
    await _drain(shell, goodbye)
    health.cancel()
    await _stop(shell, server, engine)
    if metrics is not None:
        metrics.close()
    goodbye.cancel()
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
        verify_kv=config.verify_kv,
        prefix_cache=config.prefix_cache,
    )


def _serve_metrics(shell: Shell, description: WorkerDescription) -> MetricsServer | None:
    """Of the load as of the engine's last turn."""
    if not shell.config.metrics:
        return None
    labels = {"worker": description.worker_id, "role": description.role.value}
    return MetricsServer(shell.config.metrics, lambda: load_metrics([(labels, shell.load())]))


async def _drain(shell: Shell, goodbye: asyncio.Future[None]) -> None:
    """Until nothing is left and the goodbye said, the grace is nearly over, or a second signal came."""
    assert shell.hub is not None and shell.times is not None
    log.info("draining", seconds=round(shell.times.ends_at - time.monotonic(), 3))
    wait = Leaving(shell.times, time.monotonic())
    done = False
    while not done and shell.num_signals < 2:
        await asyncio.sleep(LOOK_S)
        now = time.monotonic()
        wait, done = replace(wait, times=shell.times).look(shell.load(), shell.hub.num_sessions, now)
        done = done and (goodbye.done() or now >= shell.times.close_at)


async def _stop(shell: Shell, server: RpcServer, engine: EngineThread) -> None:
    """Sessions end first (their requests are moved), then engine and transport, and last the links."""
    assert shell.hub is not None and shell.links is not None and shell.transport is not None
    assert shell.times is not None
    shell.hub.end_all("the worker is stopping")
    left_s = shell.times.ends_at - time.monotonic() - LEAST_STOP_S
    await _until(lambda: is_quiet(shell.load()), min(STOP_GRACE_S, max(LEAST_STOP_S, left_s)))
    await shell.loop.run_in_executor(None, engine.stop)
    shell.peer_calls.shutdown(wait=False, cancel_futures=True)
    if shell.transport.refuses_late:  # its threads may wait for room in a link, whose end proves nothing here
        await shell.links.close()
    await shell.loop.run_in_executor(None, shell.transport.close)
    await shell.links.close()
    await server.stop(1.0)


async def _until(condition: Callable[[], bool], at_most_s: float) -> None:
    ends_at = time.monotonic() + at_most_s
    while not condition() and time.monotonic() < ends_at:  # noqa: ASYNC110  # the engine thread sets no event
        await asyncio.sleep(LOOK_S)
