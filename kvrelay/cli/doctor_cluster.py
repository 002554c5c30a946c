"""What `doctor` asks a running cluster: its topology, and each worker's health, with the time that answers take."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvrelay.doctor.cluster import Worker
from kvrelay.rpc.channel import open_sync_channel
from kvrelay.rpc.status import from_rpc_error
from kvrelay.v1 import admin_pb2, admin_pb2_grpc, common_pb2

ASKED = 5
"""The shortest of so many round trips is taken."""
ASKED_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class Answer:
    """Of a coordinator. error: why there is none."""

    round_trips_s: tuple[float, ...] = ()
    workers: tuple[Worker, ...] = ()
    error: str = ""


def ask_cluster(target: str, timeout_s: float) -> Answer:
    """Everything there is to know from outside, within about two times timeout_s."""
    times: list[float] = []
    try:
        with open_sync_channel(target) as channel:
            stub = admin_pb2_grpc.AdminServiceStub(channel)
            for _ in range(ASKED):
                begun = time.monotonic()
                topology = stub.GetTopology(admin_pb2.GetTopologyRequest(), timeout=timeout_s)
                times.append(time.monotonic() - begun)
    except grpc.RpcError as error:
        return Answer(error=from_rpc_error(error).message)
    return Answer(tuple(times), _ask_workers(topology.workers, timeout_s))


def serves(target: str, timeout_s: float) -> bool:
    """Whether a coordinator answers there."""
    try:
        with open_sync_channel(target) as channel:
            admin_pb2_grpc.AdminServiceStub(channel).GetTopology(admin_pb2.GetTopologyRequest(), timeout=timeout_s)
    except grpc.RpcError:
        return False
    return True


def _ask_workers(found: Sequence[admin_pb2.WorkerStatus], timeout_s: float) -> tuple[Worker, ...]:
    if not found:
        return ()
    with ThreadPoolExecutor(ASKED_AT_ONCE) as pool:
        answers = pool.map(lambda status: _health(status.description.address, timeout_s), found)
        return tuple(_worker(status, *answer) for status, answer in zip(found, answers, strict=True))


def _health(address: str, timeout_s: float) -> tuple[str, float | None]:
    """(SERVING or NOT_SERVING or why not, shortest round trip)."""
    shortest = float("inf")
    try:
        with open_sync_channel(address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            for number in range(ASKED):
                begun = time.monotonic()
                status = stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s).status
                if number:  # the first one connects
                    shortest = min(shortest, time.monotonic() - begun)
    except grpc.RpcError as error:
        return from_rpc_error(error).message, None
    return health_pb2.HealthCheckResponse.ServingStatus.Name(status), shortest


def _worker(status: admin_pb2.WorkerStatus, health: str, round_trip_s: float | None) -> Worker:
    about = status.description
    return Worker(
        worker_id=about.worker_id,
        role=common_pb2.Role.Name(about.role).removeprefix("ROLE_").lower(),
        address=about.address,
        model=f"{about.model.model_id} ({about.model.fingerprint[:8]})",
        layout="; ".join(_layout(layout) for layout in about.layouts),
        transport=about.transport,
        executor=about.executor,
        protocol_version=str(about.protocol_version),
        prefix_cache=about.prefix_cache,
        verify_kv=about.verify_kv,
        silent_s=status.silent_s,
        draining=status.load.draining,
        quarantined=status.load.blocks.quarantined,
        health=health,
        round_trip_s=round_trip_s,
        clock_offset_s=status.clock.offset_s if status.HasField("clock") else None,
        clock_error_s=status.clock.error_s if status.HasField("clock") else None,
    )


def _layout(layout: common_pb2.KVLayout) -> str:
    heads = f"{layout.layers} layers x {layout.kv_heads} heads of {layout.head_dim}"
    return f"{heads}, {layout.dtype}, blocks of {layout.block_size}"
