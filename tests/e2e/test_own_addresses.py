"""Coordinator, prefill and decode with addresses of their own, as on three hosts: KV blocks cross over TCP."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.cluster import until
from support.networks import Host, NotPermitted, hosts, port_of, tcp_between
from support.processes import RoleProcess
from support.streams import answer_of, case_of, stream_of

from kvrelay.client import AsyncClient, Client, GenerateResult

pytestmark = pytest.mark.e2e

OVER_TCP = {"UCX_TLS": "tcp"}
"""NIXL would take shared memory between processes of one machine."""
PORT = 50071
LENGTH = 700
BLOCKS = 44


@dataclass(frozen=True)
class Processes:
    coordinator: RoleProcess
    prefill: RoleProcess
    decode: RoleProcess

    def addresses(self) -> dict[str, str]:
        with Client(self.coordinator.address) as client:
            return {w["role"]: w["address"] for w in client.topology()["workers"]}


@contextmanager
def started(directory: Path, hosts: Mapping[str, tuple[str, tuple[str, ...]]]) -> Iterator[Processes]:
    """hosts: role -> its address, and the command it runs inside of. Each listens on its own address, port 50071."""
    with ExitStack() as stack:

        def start(role: str, *flags: str) -> RoleProcess:
            address, inside = hosts[role]
            listen = ("--executor", "hash", "--listen", f"{address}:{PORT}")
            process = RoleProcess(directory, role, *listen, *flags, env=OVER_TCP, inside=inside)
            stack.callback(process.kill)
            return process

        coordinator = start("coordinator")
        worker = ("--coordinator", coordinator.address, "--transport", "nixl", "--num-blocks", "64")
        processes = Processes(coordinator, start("prefill", *worker), start("decode", *worker))
        until(lambda: len(processes.addresses()) == 2, 10.0, "both workers are known")
        yield processes


async def answered(target: str) -> GenerateResult:
    """A prompt of 44 blocks, answered exactly."""
    case = case_of(LENGTH, 24)
    async with AsyncClient(target) as client:
        result = await stream_of(client, case).collect()
    assert result.token_ids == answer_of(case)
    return result


async def test_blocks_cross_over_tcp_between_addresses_of_one_machine(tmp_path: Path) -> None:
    own = {role: (f"127.0.0.{last}", ()) for role, last in (("coordinator", 2), ("prefill", 3), ("decode", 4))}
    with started(tmp_path, own) as processes:
        assert processes.coordinator.address == f"127.0.0.2:{PORT}"
        assert processes.addresses() == {"prefill": f"127.0.0.3:{PORT}", "decode": f"127.0.0.4:{PORT}"}
        result = await answered(processes.coordinator.address)
        assert result.hand_off is not None
        assert (result.hand_off.transport, result.hand_off.num_blocks) == ("nixl", BLOCKS)
        shared = tcp_between(processes.prefill.pid, processes.decode.pid)
        of_blocks = [ends for ends in shared if PORT not in map(port_of, ends)]
        assert of_blocks, f"only the link is a TCP connection: {shared}"


@pytest.fixture
def three_hosts() -> Iterator[list[Host]]:
    with ExitStack() as stack:
        try:
            made = stack.enter_context(hosts(3))
        except NotPermitted as why:
            pytest.skip(str(why))
        yield made


async def test_blocks_cross_over_the_network_between_three_hosts(tmp_path: Path, three_hosts: list[Host]) -> None:
    roles = dict(zip(("coordinator", "prefill", "decode"), three_hosts, strict=True))
    with started(tmp_path, {role: (host.address, host.inside) for role, host in roles.items()}) as processes:
        assert processes.addresses() == {role: f"{roles[role].address}:{PORT}" for role in ("prefill", "decode")}
        namespaces = {os.stat(f"/proc/{p.pid}/ns/net").st_ino for p in vars(processes).values()}
        assert len(namespaces) == 3
        before = roles["prefill"].bytes_sent()
        result = await answered(processes.coordinator.address)
        assert result.hand_off is not None
        assert (result.hand_off.transport, result.hand_off.num_blocks) == ("nixl", BLOCKS)
        assert roles["prefill"].bytes_sent() - before >= result.hand_off.num_bytes > 0
