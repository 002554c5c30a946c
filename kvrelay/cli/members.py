"""Which processes a local cluster has, as command lines. Pure but for the look whether the port is free."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile

from kvrelay.cli.cluster import STOP_GRACE_S, Member, python_module
from kvrelay.cli.roles import flag_of
from kvrelay.config import CoordinatorConfig, UpConfig, WorkerConfig
from kvrelay.config_load import keys_of, load_coordinator, load_up, load_worker, parse_address
from kvrelay.errors import InvalidArgument, Unavailable
from kvrelay.requests import Role

WORKER_LISTEN = "127.0.0.1:0"
CLAIMS = 3
KILL_AFTER_S = 4.0
"""A worker that has not ended so long after its grace is killed."""


@dataclass(frozen=True, slots=True)
class LocalPlan:
    """What `up` starts: the members, coordinator first, and where clients reach it. stop_grace_s: for all to end.

    http: HOST:PORT of the OpenAI door, "" without one.
    """

    up: UpConfig
    target: str
    http: str
    members: tuple[Member, ...]
    stop_grace_s: float = STOP_GRACE_S

    @property
    def num_workers(self) -> int:
        return self.up.prefill + self.up.decode


def plan_local(options: Mapping[str, object], *, path: str, env: Mapping[str, str], parent_pid: int) -> LocalPlan:
    """options: flags as given, None where not. All configs are checked here, before a process starts."""
    up = load_up(options, path=path, env=env)
    coordinator = load_coordinator(options, path=path, env=env)
    placed = {**options, "listen": WORKER_LISTEN, "advertise": ""}
    workers = [load_worker(role, placed, path=path, env=env) for role in Role]
    for worker in workers:
        require_model(worker)
    target = _claimed(coordinator.listen, "listen")
    http = _claimed_beside(target, coordinator.http) if coordinator.http else ""
    require_folder(coordinator.trace_dir, "trace_dir")
    require_folder(up.log_dir, "log_dir")
    common = ("--die-with-parent", str(parent_pid), *(("--config", path) if path else ()))
    metrics = metrics_addresses(coordinator.metrics, 1 + up.prefill + up.decode)
    for address in filter(None, metrics):
        claim_port(address, "metrics")
    front = {**options, "listen": target, "http": http}
    members = [Member("coordinator", _command("coordinator", CoordinatorConfig, front, common))]
    for role, count in ((Role.PREFILL, up.prefill), (Role.DECODE, up.decode)):
        for number in range(count):
            name = f"{role.value}-{number}"
            own = {**placed, "coordinators": reachable(target), "worker_id": name, "metrics": metrics[len(members)]}
            members.append(Member(name, _command(role.value, WorkerConfig, own, common)))
    stop_grace_s = max(STOP_GRACE_S, *(worker.drain_grace_s + KILL_AFTER_S for worker in workers))
    return LocalPlan(up, target, http, tuple(members), stop_grace_s)


def metrics_addresses(address: str, count: int) -> list[str]:
    """One for each process: the given port, then those after it. All "" without one, all port 0 for port 0."""
    if not address:
        return [""] * count
    host, port = parse_address(address)
    if port + count - 1 > 65535:
        raise InvalidArgument(f"metrics: {count} processes need ports up to {port + count - 1}", field="metrics")
    return [f"{host}:{port + i if port else 0}" for i in range(count)]


def require_model(config: WorkerConfig) -> None:
    """NotFound, InvalidArgument or Unimplemented, field `model`, when its directory cannot be served."""
    if config.executor == "torch":
        from kvrelay.models.catalog import resolve
        from kvrelay.models.config import ModelConfig

        ModelConfig.from_dir(resolve(config.model))


def require_folder(path: str, field: str) -> None:
    """Makes the folder unless path is ""; InvalidArgument of the field where nothing can be written into it."""
    if not path:
        return
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise InvalidArgument(f"cannot write into {path}: {error.strerror or error}", field=field) from error


def _claimed(address: str, field: str) -> str:
    host, port = claim_port(address, field)
    return f"{host}:{port}"


def _claimed_beside(target: str, http: str) -> str:
    """InvalidArgument where both doors would have one address. A free port may be the one just given back."""
    for _ in range(CLAIMS):
        claimed = _claimed(http, "http")
        if claimed != target:
            return claimed
    raise InvalidArgument(f"http: {http} is where gRPC listens; give each a port of its own", field="http")


def claim_port(listen: str, field: str = "listen") -> tuple[str, int]:
    """(host, port) of an address nobody listens on; port 0 becomes a free one. Unavailable names a taken one."""
    host, port = parse_address(listen)
    family = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), port))
        except OSError as error:
            reason = error.strerror or str(error)
            raise Unavailable(f"cannot listen on {listen}: {reason}", field=field) from error
        return host, int(probe.getsockname()[1])


def reachable(target: str) -> str:
    """An address to dial for one that is listened on: a wildcard host becomes loopback."""
    host, port = parse_address(target)
    return f"{ {'0.0.0.0': '127.0.0.1', '[::]': '[::1]'}.get(host, host) }:{port}"


def _command(role: str, kind: type, options: Mapping[str, object], common: tuple[str, ...]) -> tuple[str, ...]:
    """Command line of one member: the flags its role knows, of those given."""
    flags: list[str] = []
    for key in keys_of(kind):
        value = options.get(key)
        if isinstance(value, bool):
            flags.append(flag_of(key) if value else f"--no-{key.replace('_', '-')}")
        elif value is not None and value != "":
            flags += ["--coordinator" if key == "coordinators" else flag_of(key), str(value)]
    return python_module("kvrelay.cli.main", role, *flags, *common)
