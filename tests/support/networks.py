"""Hosts of their own for processes of a test: network namespaces on one switch. Also who speaks TCP with whom."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

ESTABLISHED = "01"


class NotPermitted(Exception):
    """Network namespaces cannot be made here; says why."""


@dataclass(frozen=True, slots=True)
class Host:
    """A namespace with one network card besides loopback."""

    name: str
    address: str

    @property
    def inside(self) -> tuple[str, ...]:
        """Before a command: runs it there, under the same pid."""
        return ("ip", "netns", "exec", self.name)

    def bytes_sent(self) -> int:
        """By its network card since it is there: headers and all."""
        command = (*self.inside, "cat", "/sys/class/net/eth0/statistics/tx_bytes")
        return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """`count` hosts that reach each other, and this process them. NotPermitted where that cannot be.

    The switch between them has a namespace too: rules of this machine's firewall for bridges do not hold there.
    The addresses are of 198.18.0.0/15, which is set aside for tests of networks. All is removed at the end.
    """
    mine = f"kvr{os.getpid()}"
    net = f"198.18.{os.getpid() % 250}"
    switch = f"{mine}-switch"
    made = [Host(f"{mine}-{i}", f"{net}.{i + 1}") for i in range(count)]
    try:
        try:
            _ip("netns", "add", switch)
            _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
            _ip("-n", switch, "link", "set", "bridge", "up")
            _ip("link", "add", mine, "type", "veth", "peer", "name", "outside", "netns", switch)
            _plug(switch, "outside")
            _ip("addr", "add", f"{net}.254/24", "dev", mine)
            _ip("link", "set", mine, "up")
            for i, host in enumerate(made):
                _add(host, f"port{i}", switch)
        except (OSError, subprocess.CalledProcessError) as error:
            why = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else str(error)
            raise NotPermitted(f"network namespaces cannot be made here: {why}") from error
        yield made
    finally:
        with suppress(OSError):
            for name in (*(h.name for h in made), switch):
                subprocess.run(("ip", "netns", "del", name), check=False, capture_output=True)


def _add(host: Host, port: str, switch: str) -> None:
    _ip("netns", "add", host.name)
    _ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", host.name)
    _plug(switch, port)
    _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", "eth0")
    for card in ("lo", "eth0"):
        _ip("-n", host.name, "link", "set", card, "up")


def _plug(switch: str, port: str) -> None:
    _ip("-n", switch, "link", "set", port, "master", "bridge", "up")


def _ip(*arguments: str) -> None:
    subprocess.run(("ip", *arguments), check=True, capture_output=True, text=True)


def tcp_between(pid: int, other: int) -> set[frozenset[str]]:
    """Connections from one process of this network to another, each as its two ends in the kernel's hexadecimal."""
    return {frozenset(ends) for ends in _connections(pid)} & {frozenset(ends) for ends in _connections(other)}


def _connections(pid: int) -> set[tuple[str, str]]:
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            target = os.readlink(link)
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]
    ]
    return {(row[1][-13:], row[2][-13:]) for row in rows if row[3] == ESTABLISHED and row[9] in inodes}


def port_of(end: str) -> int:
    """The port of an end that `tcp_between` gave."""
    return int(end.rpartition(":")[2], 16)
