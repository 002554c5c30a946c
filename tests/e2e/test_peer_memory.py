"""What a worker holds of a peer that died: with one-sided writes nothing, neither its memory nor a connection."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.cluster import until
from support.processes import RoleProcess, role_process
from support.streams import assert_exact, case_of

from kvrelay.client import Client

pytestmark = pytest.mark.e2e

RESTARTS = 3
LETS_GO_WITHIN_S = 5.0


@dataclass(frozen=True)
class Held:
    """shared: (inode, name) of the shared memory that is mapped. sockets, files: open descriptors."""

    shared: frozenset[tuple[str, str]]
    sockets: int
    files: int


def held_by(pid: int) -> Held:
    lines = [line.split(None, 5) for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    shared = {(f[4], f[5]) for f in lines if len(f) > 5 and ("/dev/shm/" in f[5] or "SYSV" in f[5])}
    links = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            links.append(os.readlink(f"/proc/{pid}/fd/{name}"))
        except FileNotFoundError:  # closed between listing and reading
            continue
    sockets = sum(link.startswith("socket:") for link in links)
    return Held(frozenset(shared), sockets, len(links) - sockets)


class Two:
    def __init__(self, directory: Path, target: str) -> None:
        common = ("--executor", "hash", "--transport", "nixl", "--num-blocks", "128", "--coordinator", target)
        self.target = target
        self.prefill = RoleProcess(directory, "prefill", "--worker-id", "p", *common)
        self.decode = RoleProcess(directory, "decode", "--worker-id", "d", *common)

    def until_serving(self) -> None:
        pids = {self.prefill.pid, self.decode.pid}
        with Client(self.target) as client:
            until(lambda: {w["pid"] for w in client.topology()["workers"]} == pids, 20.0, "both are up")


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Two]:
    with role_process(tmp_path, "coordinator", "--executor", "hash", "--listen", "127.0.0.1:0") as coordinator:
        made = Two(tmp_path, coordinator.address)
        try:
            made.until_serving()
            yield made
        finally:
            made.prefill.kill()
            made.decode.kill()


@pytest.mark.parametrize("victim", ["prefill", "decode"])
async def test_a_worker_lets_go_of_a_peer_that_died_and_grows_with_none(two: Two, victim: str) -> None:
    dying, survivor = (two.prefill, two.decode) if victim == "prefill" else (two.decode, two.prefill)
    await assert_exact(two.target, *(case_of(n, 8, seed=n) for n in (20, 100, 300)))
    paired = held_by(survivor.pid)
    for life in range(RESTARTS):
        of_the_dead = held_by(dying.pid).shared
        assert of_the_dead, "it has shared memory of its own: the test sees something"
        await asyncio.to_thread(dying.kill)

        def has_let_go(dead: frozenset[tuple[str, str]] = of_the_dead) -> bool:
            now = held_by(survivor.pid)
            return not now.shared & dead and now.sockets < paired.sockets and now.files <= paired.files

        await asyncio.to_thread(until, has_let_go, LETS_GO_WITHIN_S, f"nothing of the dead peer is held, life {life}")
        await asyncio.to_thread(dying.start)
        await asyncio.to_thread(two.until_serving)
        await assert_exact(two.target, *(case_of(n, 8, seed=n) for n in (20, 100, 300)))
        now = held_by(survivor.pid)
        assert len(now.shared) <= len(paired.shared)
        assert now.files <= paired.files
        assert now.sockets <= paired.sockets
