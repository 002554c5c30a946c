"""The port between decisions and computing: a plan in, a result out. Knows no implementation."""

from __future__ import annotations

from typing import Protocol

from engine.memory import HostPool
from engine.plan import Plan, Result
from kvrelay.blocks import KVLayout


class Executor(Protocol):
    """A model with its KV pool. Called from one thread; blocks belong to whoever made the plan."""

    @property
    def layout(self) -> KVLayout:
        """Shape of a block of `pool`."""

    @property
    def pool(self) -> HostPool:
        """Where KV lies: block tables of plans point into it, transports read and write it."""

    @property
    def swap(self) -> HostPool | None:
        """Host memory for blocks of preempted sequences; None: plans must not swap."""

    def run(self, plan: Plan) -> Result:
        """Carry out the plan's moves, write the KV of all its rows, and sample for each slice with `samples`."""

    def close(self) -> None:
        """Let go of memory and threads. The executor is not used afterwards."""
