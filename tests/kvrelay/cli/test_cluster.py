"""The supervisor with real, tiny processes."""

import asyncio
import os
import signal
import sys
import time

import pytest

from kvrelay.cli.cluster import Cluster, Member
from kvrelay.cli.members import claim_port, plan_local, reachable
from kvrelay.cli.supervision import GiveUp
from kvrelay.errors import InvalidArgument, Unavailable

SLEEP = "import time; print('ready 127.0.0.1:1', flush=True); time.sleep(60)"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLEEP


def python(name, code):
    return Member(name, (sys.executable, "-c", code))


class Lines:
    """What a cluster logged and said, and a way to wait for a line."""

    def __init__(self):
        self.logged, self.said = [], []

    def log(self, name, line):
        self.logged.append((name, line))

    def cluster(self, *members):
        return Cluster(members, self.log, self.said.append)


async def until(condition, within_s=20.0):
    ends_at = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < ends_at
        await asyncio.sleep(0.01)


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_output_is_logged_by_name_and_stop_ends_every_process():
    lines = Lines()
    hello = "import sys; print('out'); print('err\\udcff'.encode('utf-8','surrogateescape'), file=sys.stderr); " + SLEEP
    cluster = lines.cluster(python("a", hello), python("b", SLEEP))
    await cluster.start()
    await asyncio.wait_for(cluster.until_ready("a"), 20)
    await asyncio.wait_for(cluster.until_ready("b"), 20)
    pids = cluster.pids
    assert set(pids) == {"a", "b"}
    await cluster.stop()
    assert not any(map(alive, pids.values()))
    assert ("a", "out") in lines.logged
    assert not any("ready" in line for _, line in lines.logged)
    assert lines.said == []


async def test_a_killed_member_comes_back_as_a_new_incarnation():
    lines = Lines()
    cluster = lines.cluster(python("a", SLEEP))
    cluster.served = True
    await cluster.start()
    try:
        await asyncio.wait_for(cluster.until_ready("a"), 20)
        first = cluster.pids["a"]
        os.kill(first, signal.SIGKILL)
        await until(lambda: cluster.pids.get("a", first) != first)
        await asyncio.wait_for(cluster.until_ready("a"), 20)
        assert "killed by SIGKILL" in lines.said[0]
        assert lines.said[0].endswith("starting incarnation 2 now")
    finally:
        await cluster.stop()


async def test_a_configuration_error_ends_the_cluster_with_its_last_line():
    lines = Lines()
    cluster = lines.cluster(python("a", "print('first'); print('dtype is odd'); raise SystemExit(78)"))
    await cluster.start()
    failure = await asyncio.wait_for(cluster.failure, 20)
    await cluster.stop()
    assert failure == GiveUp(78, "a cannot be configured: dtype is odd")


async def test_a_member_that_cannot_be_started_ends_the_cluster():
    lines = Lines()
    cluster = lines.cluster(Member("a", ("/nowhere/python",)))
    await cluster.start()
    failure = await asyncio.wait_for(cluster.failure, 20)
    await cluster.stop()
    assert (failure.code, "a cannot be started" in failure.message) == (1, True)


async def test_a_member_that_ignores_sigterm_is_killed_after_the_grace():
    lines = Lines()
    cluster = lines.cluster(python("a", STUBBORN))
    await cluster.start()
    await asyncio.wait_for(cluster.until_ready("a"), 20)
    pid = cluster.pids["a"]
    await cluster.stop(grace_s=0.2)
    await until(lambda: not alive(pid))
    assert lines.said == ["still running after 0.2 s, killed: a"]


async def test_a_line_longer_than_the_buffer_does_not_stop_the_reader():
    lines = Lines()
    cluster = lines.cluster(python("a", "print('x' * 3_000_000); print('after'); " + SLEEP))
    await cluster.start()
    await asyncio.wait_for(cluster.until_ready("a"), 20)
    await cluster.stop()
    assert sum(line.count("x") for _, line in lines.logged) == 3_000_000
    assert ("a", "after") in lines.logged


def test_a_plan_names_its_members_and_gives_each_its_own_flags():
    options = {"prefill": 1, "decode": 2, "listen": "127.0.0.1:0", "executor": "hash", "threads": 3, "model": None}
    plan = plan_local(options, path="", env={}, parent_pid=77)
    assert [member.name for member in plan.members] == ["coordinator", "prefill-0", "decode-0", "decode-1"]
    assert plan.num_workers == 3
    assert plan.members[0].argv[1:] == (
        *("-m", "kvrelay.cli.main", "coordinator"),
        *("--listen", plan.target, "--executor", "hash", "--die-with-parent", "77"),
    )
    assert plan.members[3].argv[1:] == (
        *("-m", "kvrelay.cli.main", "decode", "--listen", "127.0.0.1:0", "--coordinator", plan.target),
        *("--worker-id", "decode-1", "--executor", "hash", "--threads", "3", "--die-with-parent", "77"),
    )
    assert not plan.target.endswith(":0")


def test_a_plan_with_a_wrong_setting_is_refused():
    with pytest.raises(InvalidArgument, match="--transport must be one of nixl, grpc, not 'rdma'"):
        plan_local({"transport": "rdma"}, path="", env={}, parent_pid=1)


def test_the_openai_door_is_the_coordinators_and_has_a_free_port_of_its_own():
    plan = plan_local(
        {"listen": "127.0.0.1:0", "http": "127.0.0.1:0", "executor": "hash"}, path="", env={}, parent_pid=1
    )
    assert plan.http not in ("", "127.0.0.1:0", plan.target)
    told = [m.argv[m.argv.index("--http") + 1] for m in plan.members if "--http" in m.argv]
    assert told == [plan.http]
    with pytest.raises(InvalidArgument, match="is where gRPC listens"):
        plan_local({"listen": plan.target, "http": plan.target, "executor": "hash"}, path="", env={}, parent_pid=1)


def test_an_address_of_nobody_here_cannot_be_claimed():
    with pytest.raises(Unavailable, match=r"cannot listen on 203\.0\.113\.1:1"):
        claim_port("203.0.113.1:1")


def test_a_wildcard_is_dialled_on_loopback():
    assert reachable("0.0.0.0:5") == "127.0.0.1:5"
    assert reachable("[::]:5") == "[::1]:5"
    assert reachable("10.0.0.1:5") == "10.0.0.1:5"
