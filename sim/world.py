"""The world: nodes, virtual time, and who runs next. Knows no protocol; a seed decides everything.

One pass: while some node has callbacks ready, one of them, drawn at random, makes one pass of its loop; else time moves
on to the next event of the world or the next timer of a node. Whoever must look at every step (the checks) is called
after each.
"""

from __future__ import annotations

import asyncio
import gc
import heapq
import random
import sys
import warnings
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import structlog

from sim.clock import VirtualLoop, instead_of_monotonic

_running: list[World] = []
"""The world that runs now, for what is logged meanwhile."""

ROUNDING_S = 1e-8
"""So much later a timer is certainly due on its node's own clock."""
MAX_STEPS = 3_000_000
"""More than any seed needs: beyond it something runs in a circle without time moving on."""


class Violation(AssertionError):
    """What must never happen has happened."""


class Node:
    """One life of a process. It runs only when the world steps it; a dead one never again."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.alive = True
        self.paused = False
        self.rate = world.rng.uniform(0.995, 1.005)
        self.origin = world.rng.uniform(0.0, 1e6) - world.now * self.rate
        self.loop = VirtualLoop(self.clock)
        self.on_death: list[Callable[[], None]] = []
        """Called when it has died: what its kernel does then."""
        world.add(self)

    def clock(self) -> float:
        """This process's monotonic clock."""
        return self.origin + self.world.now * self.rate

    def world_time(self, at: float) -> float:
        return (at - self.origin) / self.rate

    def jump(self, seconds: float) -> None:
        """Its clock leaps forward, as after a suspend."""
        self.origin += seconds

    def spawn(self, work: Coroutine[Any, Any, Any], name: str = "") -> asyncio.Task[Any]:
        """A task on this node's loop, also from outside of it."""
        return self.loop.create_task(work, name=name or None)

    def crash(self, why: str) -> None:
        """Ends at once: nothing of it runs any more, not even a finally."""
        if self.alive:
            self.alive = False
            self.loop.drop_all()
            self.world.trace(self.name, f"dies: {why}")
            for callback in self.on_death:
                callback()


class World:
    """Owns time, nodes and the random numbers of a run."""

    def __init__(self, seed: int, show: Callable[[str], None] | None = None) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.now = 0.0
        self.steps = 0
        self.slow_step_chance = 0.002
        self.nodes: list[Node] = []
        self.graveyard: list[Node] = []
        self.recent: deque[str] = deque(maxlen=400)
        self.after_step: list[Callable[[Node | None], None]] = []
        self.running: Node | None = None
        self.show = show
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = 0

    def add(self, node: Node) -> None:
        self.nodes.append(node)

    def at(self, when: float, call: Callable[[], None]) -> None:
        """An event of the world: the network, a fault, the end of a pause."""
        self._serial += 1
        heapq.heappush(self._events, (max(when, self.now), self._serial, call))

    def after(self, delay: float, call: Callable[[], None]) -> None:
        self.at(self.now + delay, call)

    def trace(self, who: str, what: str) -> None:
        line = f"{self.now:10.4f}  {who:<14} {what}"
        self.recent.append(line)
        if self.show is not None:
            self.show(line)

    def run_until(self, done: Callable[[], bool], until: float) -> bool:
        """Runs until `done()` or that time; True if done. Raises what a check or a node's code raised."""
        _running[:] = [self]
        try:
            with instead_of_monotonic(self._clock_of_running):
                while not done():
                    if not self._step(until):
                        self.now = until
                        return done()
        finally:
            _running.clear()
        return True

    def _clock_of_running(self) -> float:
        return self.running.clock() if self.running is not None else self.now

    def _step(self, until: float) -> bool:
        """One node's pass or one event; False when nothing happens before `until`."""
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise Violation(f"{MAX_STEPS} steps and no end")
        ready = [node for node in self.nodes if not node.paused and self._is_ready(node)]
        if ready:
            node = ready[0] if len(ready) == 1 else self.rng.choice(ready)
            self._run(node)
            return True
        when = min((self._next_due(node) for node in self.nodes if not node.paused), default=float("inf"))
        if self._events and self._events[0][0] <= when:
            when = self._events[0][0]
            if when > until:
                return False
            self.now = when
            heapq.heappop(self._events)[2]()
            self._look(None)
            return True
        if when > until:
            return False
        self.now = max(self.now, when)
        return True

    def _is_ready(self, node: Node) -> bool:
        if node.loop.has_ready():
            return True
        due = node.loop.next_due()
        return due is not None and due < node.clock()

    @staticmethod
    def _next_due(node: Node) -> float:
        due = node.loop.next_due()
        return float("inf") if due is None else node.world_time(due) + ROUNDING_S

    def _run(self, node: Node) -> None:
        self.running = node
        try:
            node.loop.step()
        except (NodeDied, IndexError):
            if node.alive:  # a dead one's callbacks were taken away in the middle of its pass
                raise
        finally:
            self.running = None
        if node.loop.failures and node.alive:  # of a dead one tasks are dropped in the middle, which loops report
            raise Violation(f"{node.name}: {describe(node.loop.failures[0])}")
        self.bury()
        self._look(node)

    def bury(self) -> None:
        dead = [node for node in self.nodes if not node.alive]
        if dead:
            self.graveyard += dead
            self.nodes = [node for node in self.nodes if node.alive]

    def _look(self, node: Node | None) -> None:
        self.bury()
        for look in self.after_step:
            look(node)


@contextmanager
def dropping_what_is_left() -> Iterator[None]:
    """Collects the garbage that worlds made inside the block: their tasks are dropped in the middle, without a word."""
    told = sys.unraisablehook
    gc.disable()
    try:
        yield
    finally:
        sys.unraisablehook = lambda _: None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            gc.collect()
        sys.unraisablehook = told
        gc.enable()


def log_into_trace(_: Any, level: str, event: MutableMapping[str, Any]) -> str:
    """A structlog processor, the last one: the line goes into the trace of the world that runs."""
    if _running:
        world = _running[0]
        who = world.running.name if world.running is not None else "-"
        rest = " ".join(f"{key}={value}" for key, value in event.items() if key != "event")
        world.trace(who, f"[{level}] {event['event']} {rest}")
    raise structlog.DropEvent


class NodeDied(SystemExit):
    """Unwinds the code of a node that dies in the middle of it. A SystemExit: tasks and loops let it pass."""


def describe(context: dict[str, Any]) -> str:
    error, where = context.get("exception"), context.get("task") or context.get("future") or ""
    return f"{context.get('message')}: {type(error).__name__}: {error} {where}"
