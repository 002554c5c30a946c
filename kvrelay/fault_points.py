"""Named places in our own code where a test may let something go wrong. Without one, a point costs nothing.

A process takes one order from its environment: KVRELAY_FAULT_POINT="NAME:ACTION:NTH", at the NTH passage of NAME.
ACTION: kill (SIGKILL), stop (SIGSTOP), raise (FaultInjected). Just before, a line is added to the file that
KVRELAY_FAULT_PROOF names, if any: a fault that left no proof did not happen.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping

NAMES = frozenset(
    {
        "decode.reserved",
        "decode.landed",
        "decode.started",
        "decode.step",
        "prefill.taken",
        "prefill.chunk",
        "prefill.part",
        "prefill.sampled",
        "prefill.pushed",
        "worker.command",
        "worker.report",
        "worker.registration",
        "worker.watch",
        "transport.poll",
        "coordinator.roster",
        "coordinator.sweep",
        "coordinator.token",
    }
)
ACTIONS = ("kill", "stop", "raise")
ORDER, PROOF = "KVRELAY_FAULT_POINT", "KVRELAY_FAULT_PROOF"


class FaultInjected(Exception):
    """Raised at a fault point on order; nothing in our code expects it."""


_handlers: list[Callable[[str], None]] = []


def fault_point(name: str) -> None:
    """A place of that name, one of NAMES, was passed."""
    if _handlers:
        _handlers[0](name)


def install(handler: Callable[[str], None] | None) -> None:
    """From now on each passage calls `handler(name)`; None ends that."""
    _handlers[:] = [] if handler is None else [handler]


def obey(env: Mapping[str, str]) -> None:
    """Install the order of the environment, if there is one. Raises ValueError for one that cannot be meant."""
    order = env.get(ORDER, "")
    if not order:
        return
    name, action, nth = [*order.split(":"), "1", "1"][:3]
    if name not in NAMES or action not in ACTIONS or not nth.isdigit():
        raise ValueError(f"{ORDER}={order!r}: NAME:ACTION:NTH with ACTION one of {', '.join(ACTIONS)}")
    left = int(nth)

    def count_down(passed: str) -> None:
        nonlocal left
        if passed != name:
            return
        left -= 1
        if left == 0:
            _carry_out(passed, action, env.get(PROOF, ""))

    install(count_down)


def _carry_out(name: str, action: str, proof: str) -> None:
    if proof:
        with open(proof, "a") as file:
            file.write(f"{os.getpid()} {name} {action}\n")
    if action == "raise":
        raise FaultInjected(f"ordered at {name}")
    os.kill(os.getpid(), signal.SIGKILL if action == "kill" else signal.SIGSTOP)
