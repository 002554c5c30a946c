"""A background loop that dies takes its process with it, or its work is begun anew: it is never just not there.

An exception that nothing expects is raised inside each loop in turn. Whoever carried it out either ends non-zero soon,
or goes on to serve.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import pytest
from support.cluster import is_alive, until
from support.processes import RoleProcess, role_process
from support.streams import assert_exact, case_of

from kvrelay.client import AsyncClient, Client
from kvrelay.errors import KVRelayError
from kvrelay.fault_points import ORDER, PROOF

pytestmark = pytest.mark.e2e

ENDS_WITHIN_S = 3.0
BROKEN = 70
COMMON = ("--executor", "hash", "--num-blocks", "128", "--step-tokens", "64")


class Trio:
    """A coordinator, a prefill and a decode worker; one of them may be started with an order."""

    def __init__(self, directory: Path, transport: str) -> None:
        self.directory = directory
        self.coordinator = RoleProcess(directory, "coordinator", "--executor", "hash", "--listen", "127.0.0.1:0")
        self.target = self.coordinator.address
        common = (*COMMON, "--transport", transport, "--coordinator", self.target)
        self.prefill = RoleProcess(directory, "prefill", "--worker-id", "p", *common)
        self.decode = RoleProcess(directory, "decode", "--worker-id", "d", *common)
        self.until_serving()

    def until_serving(self) -> None:
        pids = {self.prefill.pid, self.decode.pid}
        until(lambda: self.pids() == pids, 20.0, "both workers are up")

    def pids(self) -> set[int]:
        try:
            with Client(self.target, timeout=2.0) as client:
                return {w["pid"] for w in client.topology()["workers"]}
        except KVRelayError:
            return set()

    def close(self) -> None:
        for process in (self.prefill, self.decode, self.coordinator):
            process.kill()


@pytest.fixture(scope="module", params=["nixl", "grpc"])
def trio(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trio]:
    made = Trio(tmp_path_factory.mktemp("loops"), request.param)
    yield made
    made.close()


def order(directory: Path, point: str) -> dict[str, str]:
    return {ORDER: f"{point}:raise:3", PROOF: str(directory / f"proof-{point}-{time.monotonic_ns()}")}


async def ask_until_done(target: str, env: Mapping[str, str], within_s: float = 20.0) -> None:
    """Requests, whatever becomes of them, until the order has been carried out."""
    ends_at = time.monotonic() + within_s
    async with AsyncClient(target) as client:
        while not await asyncio.to_thread(Path(env[PROOF]).exists):
            assert time.monotonic() < ends_at, f"{env[ORDER]} was not carried out"
            with suppress(KVRelayError, TimeoutError):
                async with asyncio.timeout(1.0):
                    await client.generate(list(case_of(70, 4).prompt), max_tokens=4, ignore_eos=True).collect()


@pytest.mark.parametrize(
    ("role", "point"),
    [
        ("prefill", "worker.registration"),
        ("decode", "worker.watch"),
        ("prefill", "transport.poll"),
        ("prefill", "prefill.chunk"),
        ("decode", "decode.step"),
    ],
)
async def test_a_worker_ends_with_any_of_its_loops(trio: Trio, role: str, point: str) -> None:
    victim = trio.prefill if role == "prefill" else trio.decode
    victim.kill()
    env = order(trio.directory, point)
    await asyncio.to_thread(victim.start, env=env)
    await ask_until_done(trio.target, env)
    assert await asyncio.to_thread(victim.wait, ENDS_WITHIN_S) == BROKEN
    assert f"ordered at {point}" in victim.log.read_text()
    victim.start()
    await asyncio.to_thread(trio.until_serving)
    await assert_exact(trio.target, case_of(100, 8), case_of(17, 8))


@pytest.mark.parametrize("point", ["worker.command", "worker.report"])
async def test_a_session_whose_loop_dies_is_ended_and_a_new_one_serves(trio: Trio, point: str) -> None:
    trio.decode.kill()
    env = order(trio.directory, point)
    await asyncio.to_thread(trio.decode.start, env=env)
    await ask_until_done(trio.target, env)
    assert is_alive(trio.decode.pid)
    await asyncio.to_thread(trio.until_serving)
    await assert_exact(trio.target, case_of(100, 8), case_of(17, 8))
    assert is_alive(trio.decode.pid)


@pytest.mark.parametrize("point", ["coordinator.roster", "coordinator.sweep"])
def test_a_coordinator_ends_with_any_of_its_loops(tmp_path: Path, point: str) -> None:
    env = order(tmp_path, point)
    with role_process(tmp_path, "coordinator", "--executor", "hash", "--listen", "127.0.0.1:0") as coordinator:
        coordinator.kill()
        coordinator.start(env=env)
        until(Path(env[PROOF]).exists, 10.0, "the order is carried out")
        assert coordinator.wait(ENDS_WITHIN_S) == 1
    assert f"ordered at {point}" in coordinator.log.read_text()


def test_an_order_that_cannot_be_meant_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="NAME:ACTION:NTH"):
        RoleProcess(tmp_path, "decode", *COMMON, env={ORDER: "decode.nowhere:raise:1"})
