"""Composes a prefill worker: the prefill core on the engine thread, its service and its links around it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from engine.block_pool import BlockPool
from engine.budgets import Budgets
from engine.executor import Executor
from engine.scheduler import Scheduler
from kvrelay.config import WorkerConfig
from kvrelay.errors import KVRelayError
from kvrelay.link import LinkHello, LinkWelcome
from kvrelay.requests import Incarnation
from kvrelay.rpc.server import RpcServer
from kvrelay.session import WorkerDescription
from kvrelay.v1 import worker_pb2_grpc
from kvtransfer.actions import Reply, Send
from kvtransfer.store import block_checksum
from kvtransfer.writer import WriterTable
from prefill_svc.attempt import PrefillParts
from prefill_svc.core import PrefillCore
from prefill_svc.service import PrefillService
from worker.events import Core, DropPeer, OpenLink
from worker.life import EXIT_CONFIG, run_shell
from worker.link_client import LinkClient
from worker.pace import Pace
from worker.roles import build_executor as build_from
from worker.roles import identity_of
from worker.session_hub import SessionHub
from worker.shell import Shell, log
from worker.transports import make_transport
from worker.wire import dial_link


class _PrefillLinks:
    def __init__(self, client: LinkClient, drop_peer: Callable[[Incarnation], None]) -> None:
        self.client = client
        self._drop_peer = drop_peer

    def deliver(self, action: Reply | Send | OpenLink | DropPeer) -> None:
        if isinstance(action, OpenLink):
            self.client.ensure(action)
        elif isinstance(action, DropPeer):
            self.client.let_go(action.peer, self._drop_peer)
        else:
            assert isinstance(action, Send), f"prefill does not {type(action).__name__}"
            self.client.send(action.peer, action.message)

    async def close(self) -> None:
        await self.client.close()


class PrefillMain:
    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self.identity = identity_of(config)

    def build(self, shell: Shell) -> tuple[Core, Executor]:
        config = self._config
        executor = build_from(config)
        pool = BlockPool(executor.pool.num_blocks, cache=config.prefix_cache)
        budgets = Budgets(max_tokens=config.step_tokens, max_sequences=config.max_sequences)
        core = PrefillCore(
            PrefillParts(
                layout=executor.layout,
                max_context=self.identity.max_context,
                vocab_size=self.identity.vocab_size,
                transport=config.transport,
                pool=pool,
                scheduler=Scheduler(pool, config.block_size, budgets, fingerprint=self.identity.fingerprint),
                table=WriterTable(
                    shell.incarnation,
                    executor.layout.block_bytes,
                    refuses_late=config.transport == "grpc",
                    checksum_of=partial(block_checksum, executor.pool) if config.verify_kv else None,
                ),
                pace=Pace(config.step_target_s, config.step_tokens),
            )
        )
        return core, executor

    def attach(self, shell: Shell, server: RpcServer, description: WorkerDescription, executor: Executor) -> None:
        hello = LinkHello(
            worker_id=description.worker_id,
            incarnation=shell.incarnation,
            decode_incarnation=Incarnation(""),
            model_fingerprint=self.identity.fingerprint,
            layout=executor.layout,
            transport=self._config.transport,
            verify_kv=self._config.verify_kv,
        )

        async def tell_transport(welcome: LinkWelcome) -> None:
            assert shell.transport is not None
            add = shell.transport.add_peer
            arguments = (welcome.incarnation, welcome.transport_metadata, welcome.pool)
            await shell.loop.run_in_executor(shell.peer_calls, add, *arguments)

        client = LinkClient(shell.mailbox, hello, dial_link, tell_transport)
        shell.links = _PrefillLinks(client, shell.drop_peer)
        shell.hub = SessionHub(shell.mailbox, description, shell.load, lambda: shell.healthy)
        server.add(
            worker_pb2_grpc.add_PrefillServiceServicer_to_server,
            PrefillService(shell.hub, shell.block_lists),
            "kvrelay.v1.PrefillService",
        )


def run_prefill(config: WorkerConfig, on_ready: Callable[[str], None]) -> int:
    """Run a prefill worker until SIGTERM or SIGINT; returns the exit code (see worker.life)."""
    try:
        role = PrefillMain(config)
    except KVRelayError as error:
        log.error("cannot start", field=error.field, why=error.message)
        return EXIT_CONFIG
    return run_shell(config, role, make_transport, on_ready)
