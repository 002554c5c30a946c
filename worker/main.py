"""The entry point of a worker process of either role."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from kvrelay.config import WorkerConfig
from kvrelay.telemetry import logging

MAINS = {"prefill": ("prefill_svc.main", "run_prefill"), "decode": ("decode_svc.main", "run_decode")}
"""By name, since worker/ lies below the roles and may not import them."""


def run_worker(config: WorkerConfig, on_ready: Callable[[str], None]) -> int:
    """Run a worker until SIGTERM or SIGINT and return its exit code; on_ready gets the advertised address."""
    logging.setup(role=config.role.value)
    module, name = MAINS[config.role.value]
    run: Callable[[WorkerConfig, Callable[[str], None]], int] = getattr(import_module(module), name)
    return run(config, on_ready)
