"""A coordinator process, from configuration to exit code.

1. Read what is served (model facts, tokenizer), set up tracing.
2. Bind; `on_ready` hears the address. Readiness follows once a decode worker has a session: it can do everything.
3. SIGTERM or SIGINT: new calls are refused, open ones get GRACE_S, what is left ends UNAVAILABLE; exit 0.
A background task that dies takes the process with it: never half alive.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING
from uuid import uuid4

import structlog
from opentelemetry.trace import NoOpTracerProvider

from coordinator.admin_service import AdminService
from coordinator.dispatch import Dispatcher
from coordinator.metrics import CoordinatorMetrics
from coordinator.model_facts import ServedModel, load_model
from coordinator.model_service import ModelService
from coordinator.readiness import Readiness
from coordinator.registry import Served
from coordinator.registry_service import RegistryService
from coordinator.roster import Roster
from coordinator.service import InferenceService
from coordinator.serving import Serving
from coordinator.steps_heard import StepsHeard
from coordinator.telling import Telling
from coordinator.text import Tokenizing
from kvrelay.config import CoordinatorConfig
from kvrelay.errors import FailedPrecondition, KVRelayError, Unavailable
from kvrelay.rpc.interceptors import GENERATE, TracingInterceptor
from kvrelay.rpc.process import settle
from kvrelay.rpc.server import RpcServer
from kvrelay.telemetry import logging, tracing
from kvrelay.telemetry.genai import to_collector
from kvrelay.telemetry.metrics import MetricsServer
from kvrelay.v1 import admin_pb2_grpc, inference_pb2_grpc, model_pb2_grpc, registry_pb2_grpc

if TYPE_CHECKING:
    from coordinator.http.server import HttpServer

log = structlog.get_logger("coordinator")

NOT_TRACED = tracing.Tracing(NoOpTracerProvider())

EXIT_CONFIG = 78
"""The model cannot be served: starting again would not help."""
HTTP_NEEDS = ("fastapi", "uvicorn", "httptools")
GRACE_S = 10.0
LAST_WORDS_S = 0.5
"""After the grace: how long the streams that were cut may take to send their status."""
MESSAGE_MARGIN = 64 * 1024
"""Room for what surrounds a request's content; beyond it gRPC itself refuses the message."""
INFERENCE = "kvrelay.v1.InferenceService"


def run_coordinator(config: CoordinatorConfig, on_ready: Callable[[str], None]) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code: 0, 1 when it could not start or go on, 78 for the model.

    on_ready hears HOST:PORT, and with an OpenAI door also its URL behind a space. 78 too where that door's packages are
    not installed.
    """
    logging.setup(role="coordinator")
    try:
        model = load_model(config)
        require_http(config)
    except KVRelayError as error:
        return _failed(error, EXIT_CONFIG)
    try:
        return asyncio.run(_main(config, model, on_ready))
    except KVRelayError as error:
        return _failed(error, 1)


def _failed(error: KVRelayError, code: int) -> int:
    print(f"kvrelay coordinator: {error.message}", file=sys.stderr)
    return code


async def _main(config: CoordinatorConfig, model: ServedModel, on_ready: Callable[[str], None]) -> int:
    try:
        telemetry = tracing.setup("kvrelay-coordinator", config.trace_dir, config.otlp_endpoint, config.trace_ratio)
    except OSError as error:
        words = f"cannot write traces into {config.trace_dir}: {error.strerror or error}"
        raise FailedPrecondition(words, field="trace_dir") from error
    try:
        coordinator = Coordinator(config, model, telemetry)
        stopping = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stopping.set)
        address = await coordinator.start()
        settle()
        on_ready(address if coordinator.http is None else f"{address} http://{coordinator.http.address}")
        return await coordinator.serve(stopping)
    finally:
        telemetry.close()


def require_http(config: CoordinatorConfig) -> None:
    """FailedPrecondition where an OpenAI door is wanted and its packages are not there."""
    missing = [name for name in HTTP_NEEDS if config.http and find_spec(name) is None]
    if missing:
        words = f"http: {missing[0]} is not installed; pip install 'kvrelay[http]' brings what the OpenAI door needs"
        raise FailedPrecondition(words, field="http")


class Coordinator:
    """All parts of one coordinator on one event loop. `start`, then `serve` or `stop`."""

    def __init__(self, config: CoordinatorConfig, model: ServedModel, traced: tracing.Tracing = NOT_TRACED) -> None:
        self._config = config
        served, tells = Served(model.identity, config.executor), traced.is_on or bool(config.metrics or config.http)
        self.roster = Roster(uuid4().hex, served, wants_steps=tells)
        self.dispatcher = Dispatcher(config, self.roster, StepsHeard(keep=traced.is_on))
        endpoint = config.otlp_endpoint
        self._gen_ai = to_collector("kvrelay-coordinator", endpoint) if endpoint else None
        self._telling = Telling(
            traced,
            self.dispatcher.steps,
            self.roster.clock_of,
            slow_s=config.trace_slow_s,
            measures=bool(config.metrics or config.http),
            gen_ai=self._gen_ai,
        )
        self.figures = self._telling.figures
        self._metrics = CoordinatorMetrics(self.dispatcher, self.roster, self.figures, traced)
        self._metrics_server: MetricsServer | None = None
        self._tokenizing = Tokenizing(model.codec)
        self._tasks: list[asyncio.Task[None]] = []
        self.server = RpcServer(
            max_receive_bytes=config.max_request_bytes + MESSAGE_MARGIN,
            interceptors=[TracingInterceptor(traced.provider)],
        )
        self.server.edge.doors[GENERATE] = self.dispatcher.refusal
        self._traced = traced
        self.serving = Serving(model, self._tokenizing, self.dispatcher, self.roster, self._telling)
        self.http: HttpServer | None = None
        """The OpenAI door, where there is one and once it serves."""
        inference = InferenceService(self.serving)
        self.server.add(inference_pb2_grpc.add_InferenceServiceServicer_to_server, inference, INFERENCE)
        self.server.add(
            model_pb2_grpc.add_ModelServiceServicer_to_server,
            ModelService(config, model, self.roster),
            "kvrelay.v1.ModelService",
        )
        self.server.add(
            admin_pb2_grpc.add_AdminServiceServicer_to_server,
            AdminService(self.roster, self.dispatcher),
            "kvrelay.v1.AdminService",
        )
        self.server.add(
            registry_pb2_grpc.add_RegistryServiceServicer_to_server,
            RegistryService(self.roster),
            "kvrelay.v1.RegistryService",
        )

    async def start(self) -> str:
        """Binds and serves; returns HOST:PORT with the real port. FailedPrecondition names a port in use."""
        port = self.server.bind(self._config.listen)
        if self._config.metrics:
            self._metrics_server = MetricsServer(self._config.metrics, self._metrics.collect)
        if self._config.http:
            self.http = await self._open_http(self._config.http)
        await self.server.start()
        readiness = Readiness(self.server, self.roster, INFERENCE)
        await readiness.start()
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self.roster.run(), name="roster"),
            loop.create_task(self.dispatcher.run(), name="dispatcher"),
            loop.create_task(readiness.run(), name="readiness"),
            loop.create_task(self._telling.run(), name="telling"),
        ]
        return f"{self._config.listen.rpartition(':')[0]}:{port}"

    async def _open_http(self, address: str) -> HttpServer:
        """Imported only here: nobody else needs FastAPI."""
        from coordinator.http.door import Door
        from coordinator.http.server import HttpServer

        collect, traced = self._metrics.collect, self._traced
        door = Door(
            self.serving, self.dispatcher, self.roster, collect, traced.provider, self._config.max_request_bytes
        )
        server = HttpServer(door)
        await server.start(address)
        return server

    async def serve(self, stopping: asyncio.Event) -> int:
        """Until `stopping` is set or a background task dies; then stops. Returns the exit code."""
        waiter = asyncio.ensure_future(stopping.wait())
        await asyncio.wait([waiter, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
        waiter.cancel()
        dead = [task for task in self._tasks if task.done()]
        for task in dead:
            log.error("background task died", task=task.get_name(), exc_info=task.exception())
        await self.stop(0.0 if dead else GRACE_S)
        return 1 if dead else 0

    async def stop(self, grace_s: float) -> None:
        """Open calls get `grace_s`; those still open then end UNAVAILABLE. Idempotent."""
        doors = [door for door in (self.server, self.http) if door is not None]
        stopped = [asyncio.ensure_future(door.stop(grace_s + LAST_WORDS_S)) for door in doors]
        _, pending = await asyncio.wait(stopped, timeout=grace_s)
        if pending:
            self.dispatcher.end_all(Unavailable("the coordinator is shutting down", retry_after_s=1.0))
        await asyncio.gather(*stopped)
        for task in self._tasks:
            task.cancel()
        self._telling.tell_steps()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._metrics_server is not None:
            self._metrics_server.close()
            self._metrics_server = None
        if self._gen_ai is not None:
            await asyncio.to_thread(self._gen_ai.close)
            self._gen_ai = None
        self._tokenizing.close()
