"""What `doctor` does, in order; yields findings as they are made. Knows what to look at, not what is good.

1. The probe of kernels starts, since importing torch takes longest.
2. Configuration, model, port, host: read. With a target: the cluster and each of its workers, asked.
3. The kernels' findings are collected; nothing else of ours runs from then on.
4. Memory bandwidth, then each transport: measured, one after the other.

Every wait ends with the time left of TOTAL_S.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvrelay.cli.doctor_cluster import ask_cluster, serves
from kvrelay.cli.doctor_host import (
    Configured,
    default_configs,
    load_configs,
    measure_bandwidth,
    need_of,
    read_cpus,
    read_memory,
)
from kvrelay.cli.doctor_probes import Probe, kernels_of, probe_transport
from kvrelay.cli.members import claim_port, reachable
from kvrelay.config import TRANSPORTS
from kvrelay.doctor.cluster import judge_cluster, judge_reached
from kvrelay.doctor.finding import Finding
from kvrelay.doctor.host import (
    judge_bandwidth,
    judge_cpus,
    judge_files,
    judge_gpus,
    judge_kernels,
    judge_memory,
    judge_python,
    judge_shm,
    judge_threads,
)
from kvrelay.doctor.settings import judge_config, judge_model, judge_port
from kvrelay.doctor.transport import judge_transport
from kvrelay.errors import KVRelayError
from kvrelay.models.catalog import resolve
from kvrelay.models.config import ModelConfig
from kvrelay.planning import model_cost
from kvrelay.requests import Role

TOTAL_S = 15.0
ASK_S, KERNELS_S, TRANSPORT_S = 1.0, 5.0, 5.0

Note = Callable[[str], None]
"""Told what is being done now."""


@dataclass(frozen=True, slots=True)
class Model:
    """Bytes of its weights and of a token's KV, 0 where there is no model."""

    weight_bytes: int = 0
    token_bytes: int = 0


class Clock:
    """Seconds left of all that a doctor may take."""

    def __init__(self) -> None:
        self._ends_at = time.monotonic() + TOTAL_S

    def at_most(self, seconds: float) -> float:
        return max(0.1, min(seconds, self._ends_at - time.monotonic()))


def examine(target: str, path: str, note: Note) -> Iterator[Finding]:
    """All findings. target "": no cluster is asked. path: of the configuration file, "" for none."""
    clock = Clock()
    configured, finding = _configured(path)
    worker = configured.workers[Role.DECODE]
    probe = Probe("kvrelay.cli.doctor_kernels", worker.dtype)
    try:
        yield judge_python(sys.version_info[:3])
        yield finding
        model, finding = _model(worker.model, worker.executor, worker.dtype)
        yield finding
        yield from _host(configured, model)
        yield from _cluster(target, clock, note) if target else _port(configured.coordinator.listen, clock, note)
        note("looking at torch, kernels and GPUs")
        kernels = kernels_of(probe, clock.at_most(KERNELS_S))
    finally:
        probe.end()
    yield judge_kernels(kernels, worker.executor)
    yield judge_gpus(kernels)
    yield from _measured(model, worker.transport, clock, note)


def _configured(path: str) -> tuple[Configured, Finding]:
    """What is configured; the defaults where that is wrong, so that the rest can be looked at."""
    env = dict(os.environ)
    variables = sum(name.startswith("KVRELAY_") for name in env)
    try:
        return load_configs(path, env), judge_config(path, variables, "", "")
    except KVRelayError as error:
        return default_configs(), judge_config(path, variables, error.message, error.field)


def _model(name: str, executor: str, dtype: str) -> tuple[Model, Finding]:
    if executor != "torch":
        return Model(), judge_model(name, executor, "", "")
    try:
        directory = resolve(name)
        cost = model_cost(ModelConfig.from_dir(directory), dtype)
    except KVRelayError as error:
        return Model(), judge_model(name, executor, "", error.message)
    return Model(cost.weight_bytes, cost.token_bytes), judge_model(name, executor, str(directory), "")


def _host(configured: Configured, model: Model) -> Iterator[Finding]:
    cpus, memory = read_cpus(), read_memory()
    need = need_of(configured, model.weight_bytes, model.token_bytes)
    yield judge_cpus(cpus)
    yield judge_threads(cpus, need)
    yield judge_memory(memory, need)
    yield judge_shm(memory)
    yield judge_files(memory)


def _port(listen: str, clock: Clock, note: Note) -> Iterator[Finding]:
    note(f"looking at {listen}")
    try:
        claim_port(listen)
    except KVRelayError as error:
        yield judge_port(listen, error.message, serves(reachable(listen), clock.at_most(ASK_S)))
    else:
        yield judge_port(listen, "", False)


def _cluster(target: str, clock: Clock, note: Note) -> Iterator[Finding]:
    note(f"asking {target} and its workers")
    answer = ask_cluster(target, clock.at_most(ASK_S))
    yield judge_reached(target, answer.round_trips_s, answer.error)
    if not answer.error:
        yield from judge_cluster(answer.workers)


def _measured(model: Model, transport: str, clock: Clock, note: Note) -> Iterator[Finding]:
    note("measuring memory bandwidth")
    try:
        rates = measure_bandwidth(1), measure_bandwidth(len(os.sched_getaffinity(0)))
    except ImportError:
        pass  # a host of coordinators alone: the finding on torch says so
    else:
        yield judge_bandwidth(*rates, model.weight_bytes)
    for name in TRANSPORTS:
        note(f"moving blocks between two processes over {name}")
        yield judge_transport(probe_transport(name, clock.at_most(TRANSPORT_S)), transport)
