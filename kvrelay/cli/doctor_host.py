"""What `doctor` reads and measures of this host: processors, memory, bandwidth, what is configured. Judges nothing."""

from __future__ import annotations

import os
import platform
import resource
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from kvrelay.config import CoordinatorConfig, UpConfig, WorkerConfig
from kvrelay.doctor.host import Cpus, Memory, Need
from kvrelay.requests import Role

CGROUP = Path("/sys/fs/cgroup")
SHM = Path("/dev/shm")
READ_BYTES = 64 * 2**20
"""Per thread: more than its share of any cache."""
READ_ROUNDS, READ_S = 8, 0.4
PROCESS_BYTES = 300 * 10**6
"""A worker's interpreter with torch, before weights and pool."""


@dataclass(frozen=True, slots=True)
class Configured:
    """All configs of a local cluster."""

    coordinator: CoordinatorConfig
    workers: dict[Role, WorkerConfig]
    up: UpConfig

    def count(self, role: Role) -> int:
        return self.up.prefill if role is Role.PREFILL else self.up.decode


def default_configs() -> Configured:
    return Configured(CoordinatorConfig(), {role: WorkerConfig(role) for role in Role}, UpConfig())


def load_configs(path: str, env: dict[str, str]) -> Configured:
    """InvalidArgument names the key that is wrong."""
    from kvrelay.config_load import load_coordinator, load_up, load_worker

    workers = {role: load_worker(role, {}, path=path, env=env) for role in Role}
    return Configured(load_coordinator({}, path=path, env=env), workers, load_up({}, path=path, env=env))


def need_of(configured: Configured, weight_bytes: int, token_bytes: int) -> Need:
    """Of one host that runs them all, as `kvrelay up` does."""
    workers = threads = num_bytes = 0
    for role, config in configured.workers.items():
        count = configured.count(role)
        pool = config.num_blocks * config.block_size * token_bytes or config.pool_mb * 2**20
        swap = config.swap_mb * 2**20 if role is Role.DECODE else 0
        workers += count
        threads += count * config.threads
        num_bytes += count * (PROCESS_BYTES + weight_bytes + pool + swap)
    return Need(workers, threads, num_bytes)


def read_cpus() -> Cpus:
    flags: set[str] = set()
    for line in _text(Path("/proc/cpuinfo")).splitlines():
        name, _, value = line.partition(":")
        if name.strip() in {"flags", "Features"}:
            flags = set(value.split())
            break
    quota, _, period = _text(CGROUP / "cpu.max").strip().partition(" ")
    cpus = int(quota) / int(period) if quota.isdigit() and period.isdigit() else 0.0
    return Cpus(len(os.sched_getaffinity(0)), cpus, os.getloadavg()[0], frozenset(flags), platform.machine())


def read_memory() -> Memory:
    available = 0
    for line in _text(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    limit, used = _text(CGROUP / "memory.max").strip(), _text(CGROUP / "memory.current").strip()
    if limit.isdigit() and used.isdigit():
        available = min(available, max(0, int(limit) - int(used)))
    shm_free = None
    if SHM.is_dir():
        disk = os.statvfs(SHM)
        shm_free = disk.f_bavail * disk.f_frsize
    return Memory(available, shm_free, resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def measure_bandwidth(threads: int) -> float:
    """Bytes a second that so many threads read together: the best of a few rounds."""
    import numpy as np

    parts = [np.ones(READ_BYTES // 8, dtype=np.int64) for _ in range(threads)]
    best_s, ends_at = float("inf"), time.perf_counter() + READ_S
    for _ in range(READ_ROUNDS):
        readers = [threading.Thread(target=part.sum) for part in parts]  # numpy lets go of the interpreter meanwhile
        begun = time.perf_counter()
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        best_s = min(best_s, time.perf_counter() - begun)
        if time.perf_counter() > ends_at:
            break
    return threads * READ_BYTES / best_s


def _text(path: Path) -> str:
    """ "" for what is not there."""
    try:
        return path.read_text()
    except OSError:
        return ""
