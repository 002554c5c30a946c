"""The control of every injection: aimed at nothing, it must not count as a fault."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import injections
from support.history import Fault
from support.injections import NoProof
from support.members import Members, View, members
from support.processes import role_process
from support.proxy import Proxy

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Members]:
    """An idle pair; nothing here may touch it."""
    common = ("--transport", "grpc", "--num-blocks", "64")
    with members(tmp_path_factory.mktemp("controls"), prefill=1, decode=1, common=common) as cluster:
        before = cluster.pids()
        yield cluster
        assert {w["id"]: w["pid"] for w in cluster.view.workers()} == before


@pytest.fixture
def bystander() -> Iterator[int]:
    """Process id of a `sleep` that belongs to nobody."""
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process.pid
        process.kill()


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    """A proxy that nobody uses."""
    proxy = Proxy()
    yield proxy
    proxy.stop()


def test_a_kill_of_a_process_outside_proves_nothing(cluster: Members, bystander: int) -> None:
    with pytest.raises(NoProof, match=f"process {bystander} ended, and was no worker"):
        injections.kill(cluster.view, bystander)


def test_a_pause_of_a_process_outside_is_felt_by_nobody(cluster: Members, bystander: int) -> None:
    with pytest.raises(NoProof, match="nobody noticed"):
        injections.pause(bystander, 0.6, injections.silence_of(cluster.view, bystander, 0.3))


def test_a_pause_of_a_process_outside_stops_no_coordinator(cluster: Members, bystander: int) -> None:
    with pytest.raises(NoProof, match="nobody noticed"):
        injections.pause(bystander, 0.3, injections.no_answer_of(cluster.target))


def test_a_pause_that_is_ended_early_proves_nothing(cluster: Members, bystander: int) -> None:
    def wake() -> str:
        subprocess.run(["kill", "-CONT", str(bystander)], check=True)
        return "felt"

    with pytest.raises(NoProof, match="was seen in states"):
        injections.pause(bystander, 0.3, wake)


def test_a_cut_of_a_line_that_nobody_uses_proves_nothing(proxy: Proxy) -> None:
    with pytest.raises(NoProof, match="0 connections reset"):
        injections.cut(proxy)


def test_a_cut_of_somebody_who_does_not_use_the_line_proves_nothing(cluster: Members, bystander: int) -> None:
    """The view's own connection goes through the proxy; the bystander's does not exist."""
    proxy = Proxy()
    proxy.aim(cluster.target)
    view = View(proxy.address)
    try:
        assert view.answers()
        with pytest.raises(NoProof, match="0 connections reset"):
            injections.cut(proxy, bystander)
        assert injections.cut(proxy).proof["connections"] == 1
    finally:
        view.close()
        proxy.stop()


def test_a_slow_line_that_nobody_uses_proves_nothing(proxy: Proxy) -> None:
    faults: list[Fault] = []
    with (
        pytest.raises(NoProof, match="no byte"),
        injections.slowed(proxy, faults, delay_s=0.1),
    ):
        pass
    assert not faults


def test_a_restart_of_somebody_elses_worker_proves_nothing(cluster: Members, tmp_path: Path) -> None:
    with (
        role_process(
            tmp_path, "prefill", "--coordinator", "127.0.0.1:1", "--executor", "hash", "--transport", "grpc"
        ) as other,
        pytest.raises(NoProof, match="was no worker of"),
    ):
        injections.restart(cluster.view, other)


def test_an_idle_pool_is_not_full(cluster: Members) -> None:
    faults: list[Fault] = []
    with pytest.raises(NoProof, match="nobody waited"), injections.crowded(cluster.view, "d0", 64, faults):
        pass
    assert not faults


def test_an_order_that_nobody_carries_out_proves_nothing(tmp_path: Path) -> None:
    env = injections.order(tmp_path, "decode.landed", "kill")
    with subprocess.Popen(["sleep", "60"], env=env) as process:
        try:
            with pytest.raises(NoProof, match="no line"):
                injections.obeyed(env, process.pid, within_s=0.2)
        finally:
            process.kill()


def test_an_order_that_another_process_carried_out_proves_nothing(tmp_path: Path, bystander: int) -> None:
    env = injections.order(tmp_path, "decode.landed", "kill")
    (tmp_path / "decode.landed.proof").write_text(f"{bystander + 1} decode.landed kill\n")
    with pytest.raises(NoProof, match="no line"):
        injections.obeyed(env, bystander, within_s=0.2)


def test_a_killed_coordinator_that_nobody_uses_proves_nothing(cluster: Members, bystander: int) -> None:
    with pytest.raises(NoProof, match=r"ended, and .* answers"):
        injections.kill_coordinator(cluster.view, bystander, cluster.view)


def test_a_killed_client_that_asked_nothing_proves_nothing(cluster: Members, bystander: int) -> None:
    with pytest.raises(NoProof, match="0 requests were open before"):
        injections.kill_client(cluster.view, bystander, 1)
