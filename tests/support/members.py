"""A cluster started by hand, process by process, so that a test may kill any of them and start it again at once.

Workers listen on fixed ports; a worker behind a proxy advertises the proxy's address instead of its own.
"""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from support.cluster import complaints_in, is_alive
from support.history import leaks
from support.processes import RoleProcess
from support.proxy import Proxy

from kvrelay.client import Client, Topology
from kvrelay.errors import KVRelayError

LOOPBACK_ANY = "127.0.0.1:0"
SERVING_WITHIN_S = 30.0
QUIET_WITHIN_S = 6.0
VIEW_TIMEOUT_S = 2.0


class View:
    """What one coordinator says of the cluster. A coordinator that does not answer knows no workers."""

    def __init__(self, target: str, timeout_s: float = VIEW_TIMEOUT_S) -> None:
        self.target = target
        self._client = Client(target, timeout=timeout_s)

    def topology(self) -> Topology | None:
        try:
            return self._client.topology()
        except KVRelayError:
            return None

    def workers(self) -> list[dict[str, Any]]:
        topology = self.topology()
        return [dict(w) for w in topology["workers"]] if topology else []

    def worker(self, worker_id: str) -> dict[str, Any] | None:
        return next((w for w in self.workers() if w["id"] == worker_id), None)

    def with_pid(self, pid: int) -> dict[str, Any] | None:
        return next((w for w in self.workers() if w["pid"] == pid), None)

    def answers(self) -> bool:
        return self.topology() is not None

    def open_requests(self) -> int:
        """-1 when the coordinator does not answer."""
        topology = self.topology()
        return topology["open_requests"] if topology else -1

    def close(self) -> None:
        self._client.close()


class Members:
    """coordinators by number, workers by id: p0, p1 ..., d0, d1 ...; views: one per coordinator."""

    def __init__(self) -> None:
        self.coordinators: list[RoleProcess] = []
        self.workers: dict[str, RoleProcess] = {}
        self.proxies: dict[str, Proxy] = {}
        self.views: list[View] = []

    @property
    def target(self) -> str:
        return self.coordinators[0].address

    @property
    def view(self) -> View:
        return self.views[0]

    def pids(self) -> dict[str, int]:
        return {name: process.pid for name, process in self.workers.items()}

    def revive(self, name: str, *flags: str, env: Mapping[str, str] | None = None) -> None:
        """Start a worker that ended (it is killed if not) again, on its old address; returns once it said ready."""
        self.workers[name].kill()
        self.workers[name].start(*flags, env=env)

    def mend(self) -> None:
        """Undo what an earlier test may have left: dead workers live again, and all serve."""
        for proxy in self.proxies.values():
            proxy.slow()
        for name, process in self.workers.items():
            if not is_alive(process.pid) or process.has_orders:
                self.revive(name)
        self.until_serving()

    def forget_coordinator(self, number: int) -> None:
        """One that a test has ended for good."""
        self.coordinators.pop(number).kill()
        self.views.pop(number).close()

    def until_serving(self, within_s: float = SERVING_WITHIN_S) -> None:
        """Every coordinator has a session with every worker, as the process that it is now."""

        def serving() -> bool:
            pids = set(self.pids().values())
            return all(pids == {w["pid"] for w in view.workers()} for view in self.views)

        wait(serving, "all workers serve", within_s, self.state)

    def until_quiet(self, within_s: float = QUIET_WITHIN_S) -> None:
        """Nothing is held, runs, waits or is on its way, on any worker."""
        ends_at = time.monotonic() + within_s
        while True:
            workers = self.view.workers()
            problems = leaks(workers) if len(workers) == len(self.workers) else [f"{len(workers)} workers"]
            if not problems:
                return
            assert time.monotonic() < ends_at, f"not within {within_s} s of the end: {problems}"
            time.sleep(0.05)  # a poll, bounded above

    def state(self) -> str:
        return "\n".join(str(w) for view in self.views for w in view.workers())

    def stop(self) -> None:
        for view in self.views:
            view.close()
        for process in [*self.workers.values(), *self.coordinators]:
            process.kill()
        for proxy in self.proxies.values():
            proxy.stop()


@contextmanager
def members(
    directory: Path,
    *,
    prefill: int = 2,
    decode: int = 2,
    coordinators: int = 1,
    common: Sequence[str] = (),
    flags: Mapping[str, Sequence[str]] | None = None,
    env: Mapping[str, Mapping[str, str]] | None = None,
    proxied: Collection[str] = (),
    coordinator_flags: Sequence[str] = (),
) -> Iterator[Members]:
    """common: flags of every worker; flags, env: of single ones by id; proxied: workers that stand behind a proxy."""
    cluster = Members()
    model = _flags(common, "--executor", "--model")
    model = model if "--executor" in model else (*model, "--executor", "hash")

    def start_coordinator(name: str) -> RoleProcess:
        own = (*model, "--listen", LOOPBACK_ANY, *coordinator_flags)
        return RoleProcess(directory, "coordinator", *own, name=name)

    def start_worker(name: str) -> RoleProcess:
        listen = fixed_address()
        own = (*common, *model, "--listen", listen, "--worker-id", name, *(flags or {}).get(name, ()))
        if name in proxied:
            cluster.proxies[name] = Proxy()
            cluster.proxies[name].aim(listen)
            own += ("--advertise", cluster.proxies[name].address)
        role = "prefill" if name[0] == "p" else "decode"
        order = (env or {}).get(name, {})
        return RoleProcess(directory, role, "--coordinator", targets, *own, name=name, env=order)

    try:
        cluster.coordinators = list(_together(start_coordinator, [f"c{i}" for i in range(coordinators)]).values())
        cluster.views = [View(c.address) for c in cluster.coordinators]
        targets = ",".join(c.address for c in cluster.coordinators)
        names = [f"p{i}" for i in range(prefill)] + [f"d{i}" for i in range(decode)]
        cluster.workers = _together(start_worker, names)
        cluster.until_serving()
        yield cluster
    finally:
        cluster.stop()
    assert [line for log in directory.glob("*.log") for line in complaints_in(log.read_text())] == []


def _together(start: Callable[[str], RoleProcess], names: Sequence[str]) -> dict[str, RoleProcess]:
    """Start all at once; if one fails, those that started are killed."""
    with ThreadPoolExecutor(max(1, len(names))) as pool:
        futures = {name: pool.submit(start, name) for name in names}
    if any(f.exception() for f in futures.values()):
        for future in futures.values():
            if not future.exception():
                future.result().kill()
    return {name: f.result() for name, f in futures.items()}


def _flags(flags: Sequence[str], *wanted: str) -> tuple[str, ...]:
    """Those of the flags, with their values, that are wanted."""
    pairs = zip(flags[::2], flags[1::2], strict=True)
    return tuple(word for pair in pairs if pair[0] in wanted for word in pair)


def fixed_address() -> str:
    """A loopback address that nobody listens on, below the ports that the kernel gives to connections."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return f"127.0.0.1:{port}"


def wait(
    condition: Callable[[], bool], what: str, within_s: float = 10.0, state: Callable[[], object] = lambda: ""
) -> None:
    ends_at = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < ends_at, f"not within {within_s} s: {what}\n{state()}"
        time.sleep(0.02)  # a poll, bounded above
