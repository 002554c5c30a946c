"""Composes a decode worker: the decode core on the engine thread, its services around it."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from decode_svc.attempt import DecodeParts
from decode_svc.core import DecodeCore
from decode_svc.service import DecodeService
from engine.block_pool import BlockPool
from engine.budgets import Budgets
from engine.executor import Executor
from engine.scheduler import Scheduler
from engine.swap_space import PreemptCosts
from kvrelay.config import WorkerConfig
from kvrelay.errors import KVRelayError
from kvrelay.link import LinkWelcome
from kvrelay.rpc.server import RpcServer
from kvrelay.session import WorkerDescription
from kvrelay.v1 import link_pb2_grpc, worker_pb2_grpc
from kvtransfer.actions import Reply, Send
from kvtransfer.receiver import ReceiverTable
from kvtransfer.store import block_checksum
from worker.events import Core, DropPeer, OpenLink
from worker.life import EXIT_CONFIG, run_shell
from worker.link_server import LinkServer
from worker.roles import build_executor as build_from
from worker.roles import identity_of
from worker.session_hub import SessionHub
from worker.shell import Shell, log
from worker.transports import make_transport
from worker.wire import LinkService

RECOMPUTE_SHARE = 4
"""A preempted sequence is computed again beside the running ones, in chunks of this part of the step budget."""


class _DecodeLinks:
    def __init__(self, server: LinkServer) -> None:
        self.server = server

    def deliver(self, action: Reply | Send | OpenLink | DropPeer) -> None:
        assert isinstance(action, Reply), f"decode does not {type(action).__name__}"
        self.server.send(action.writer, action.message)

    async def close(self) -> None:
        self.server.end_all()


class DecodeMain:
    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self.identity = identity_of(config)

    def build(self, shell: Shell) -> tuple[Core, Executor]:
        config = self._config
        executor = build_from(config)
        pool = BlockPool(executor.pool.num_blocks, cache=config.prefix_cache)
        budgets = Budgets(
            max_tokens=config.step_tokens,
            max_sequences=config.max_sequences,
            max_prefill_tokens=max(1, config.step_tokens // RECOMPUTE_SHARE),
        )
        scheduler = Scheduler(
            pool,
            config.block_size,
            budgets,
            fingerprint=self.identity.fingerprint,
            swap_slots=executor.swap.num_blocks if executor.swap is not None else 0,
        )
        scheduler.room.costs = PreemptCosts(config.preempt, swap_s=_swap_s(executor))
        core = DecodeCore(
            DecodeParts(
                incarnation=shell.incarnation,
                layout=executor.layout,
                max_context=self.identity.max_context,
                vocab_size=self.identity.vocab_size,
                pool=pool,
                scheduler=scheduler,
                table=ReceiverTable(
                    shell.incarnation,
                    executor.layout.block_bytes,
                    refuses_late=config.transport == "grpc",
                    bytes_over_link=config.transport == "grpc",
                    checksum_of=partial(block_checksum, executor.pool) if config.verify_kv else None,
                ),
                store=executor.pool,
            )
        )
        return core, executor

    def attach(self, shell: Shell, server: RpcServer, description: WorkerDescription, executor: Executor) -> None:
        assert shell.transport is not None
        welcome = LinkWelcome(
            worker_id=description.worker_id,
            incarnation=shell.incarnation,
            layout=executor.layout,
            transport=self._config.transport,
            pool=shell.transport.pool(),
            transport_metadata=shell.transport.metadata(),
        )
        links = LinkServer(shell.mailbox, welcome, self.identity.fingerprint, self._config.verify_kv)
        shell.links = _DecodeLinks(links)
        shell.hub = SessionHub(shell.mailbox, description, shell.load, lambda: shell.healthy)
        server.add(
            worker_pb2_grpc.add_DecodeServiceServicer_to_server,
            DecodeService(shell.hub, shell.block_lists),
            "kvrelay.v1.DecodeService",
        )
        server.add(link_pb2_grpc.add_LinkServiceServicer_to_server, LinkService(links), "kvrelay.v1.LinkService")


def _swap_s(executor: Executor) -> float:
    """Seconds that one block takes to host memory, measured once both sides are mapped."""
    if executor.swap is None:
        return 0.0
    for _ in range(2):
        began = time.perf_counter()
        executor.swap.write(0, 0, executor.pool.read(0))
    return time.perf_counter() - began


def run_decode(config: WorkerConfig, on_ready: Callable[[str], None]) -> int:
    """Run a decode worker until SIGTERM or SIGINT; returns the exit code (see worker.life)."""
    try:
        role = DecodeMain(config)
    except KVRelayError as error:
        log.error("cannot start", field=error.field, why=error.message)
        return EXIT_CONFIG
    return run_shell(config, role, make_transport, on_ready)
