"""A worker whose engine hangs in a step says so within 10 s, and that it is well again soon after."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.processes import role_process
from support.streams import answer_of, case_of, stream_of

from kvrelay.client import AsyncClient
from kvrelay.rpc.channel import open_channel

pytestmark = pytest.mark.e2e

STEP_S = 13.0
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


async def until_it_says(stub: health_pb2_grpc.HealthStub, status: int, service: str, within_s: float) -> None:
    began = time.monotonic()
    while (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status != status:
        assert time.monotonic() - began < within_s, f"not {status} within {within_s} s"
        await asyncio.sleep(0.05)  # a poll, bounded above


async def until_two_workers(client: AsyncClient) -> None:
    async with asyncio.timeout(20):
        while len((await client.topology())["workers"]) < 2:  # noqa: ASYNC110  # only the answer says it
            await asyncio.sleep(0.05)


async def test_a_step_that_hangs_makes_the_worker_unwell_and_its_end_well_again(tmp_path: Path) -> None:
    common = ("--executor", "hash", "--transport", "grpc", "--num-blocks", "64")
    with role_process(tmp_path, "coordinator", "--executor", "hash", "--listen", "127.0.0.1:0") as coordinator:
        flags = (*common, "--coordinator", coordinator.address)
        with (
            role_process(tmp_path, "prefill", *flags, "--step-seconds", str(STEP_S)) as prefill,
            role_process(tmp_path, "decode", *flags),
        ):
            case = case_of(20, 4)
            async with AsyncClient(coordinator.address) as client, open_channel(prefill.address) as channel:
                stub = health_pb2_grpc.HealthStub(channel)
                await until_two_workers(client)
                await until_it_says(stub, SERVING, "kvrelay.v1.PrefillService", 1.0)
                answer = asyncio.ensure_future(stream_of(client, case).collect())
                await until_it_says(stub, NOT_SERVING, "", 20.0)
                assert not answer.done()
                await until_it_says(stub, NOT_SERVING, "kvrelay.v1.PrefillService", 1.0)
                result = await answer
                await until_it_says(stub, SERVING, "", 3.0)
                await until_it_says(stub, SERVING, "kvrelay.v1.PrefillService", 1.0)
    assert result.token_ids == answer_of(case)
