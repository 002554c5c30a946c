"""The simulated cluster of one seed: starts nodes, restarts what died, looks at every step, judges the end."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from coordinator import prefix_index
from kvrelay import fault_points
from kvrelay.config import CoordinatorConfig
from sim.checks import check_coordinator, check_worker, holds_nothing, knows_wrong
from sim.clients import Clients, History
from sim.coordinator_node import Ask, CoordinatorNode
from sim.faults import FaultPlan
from sim.memory import Fabric, OneSided
from sim.network import Network
from sim.reference import Answer, OneProcess
from sim.scenario import HARMLESS, Scenario, asks_of, scenario_of
from sim.shapes import WorkerShape
from sim.sharing import shared_too_much
from sim.watch import Watch
from sim.worker_node import WorkerNode
from sim.world import Node, Violation, World, dropping_what_is_left
from worker import cache_news

LOAD_STARTS_S = 1.0
SETTLE_S = 120.0
"""Longest virtual time after the faults until every stream has ended and every block is back."""


@dataclass
class Outcome:
    """violation: empty if all was well. recent: the last lines of the trace."""

    seed: int
    violation: str = ""
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    counters: Counter[str] = field(default_factory=Counter)
    virtual_s: float = 0.0
    steps: int = 0
    recent: tuple[str, ...] = ()


class SimCluster:
    def __init__(self, scenario: Scenario, show: Callable[[str], None] | None = None) -> None:
        self.scenario = scenario
        self.world = World(scenario.seed, show)
        self.net = Network(self.world)
        self.fabric = Fabric(self.world)
        self.workers: dict[str, WorkerNode] = {}
        self.coordinators: dict[str, CoordinatorNode] = {}
        self.counters: Counter[str] = Counter()
        self._lives: Counter[str] = Counter()
        self._gone: list[WorkerNode | CoordinatorNode] = []
        self._pending_starts = 0
        self.lost_progress = 0
        self.watch = Watch(self)
        addresses = [f"{name}:1" for name in scenario.coordinators]
        self.clients = Clients(self.world, self.net, addresses, self.watch.judge_error)
        self.plan = FaultPlan(self)
        self.world.after_step += [self._look, self.watch.look]

    def start(self) -> None:
        for name in self.scenario.coordinators:
            self._start_coordinator(name)
        for shape in self.scenario.workers:
            self._start_worker(shape)
        self.world.at(LOAD_STARTS_S, self.plan.start)

    def load(self) -> None:
        """Schedules every request of the seed."""
        scenario, one = self.scenario, OneProcess(4 * max(w.num_blocks for w in self.scenario.workers))
        try:
            for ask, answers in asks_of(scenario, one.answers):
                at = LOAD_STARTS_S + self.world.rng.uniform(0.0, scenario.arrive_within_s)
                self.clients.add(self._client(ask, answers), at)
        finally:
            one.close()

    def _client(self, ask: Ask, answers: tuple[Answer, ...]) -> History:
        rng, faults, history = self.world.rng, self.scenario.faults, History(ask, answers)
        if "leave" in faults and rng.random() < 0.3:
            if rng.random() < 0.5:
                history.leave_at = rng.randint(1, max(1, sum(len(answer.token_ids) for answer in answers)))
            else:
                history.leave_after_s = rng.uniform(0.0, 0.5)
        if "slow_reader" in faults and rng.random() < 0.2:
            history.read_pause_s = rng.choice((0.05, 0.5)) / ask.n
        return history

    @property
    def quiet(self) -> bool:
        """Every client has its ending, everybody is back, and nobody holds anything."""
        return (
            not self.plan.active
            and self.world.now > LOAD_STARTS_S + self.scenario.arrive_within_s
            and not self.clients.num_open
            and not self._pending_starts
            and all(c.node.alive for c in self.coordinators.values())
            and all(w.node.alive and not holds_nothing(w) for w in self.workers.values())
            and not self._dead_peers()
            and not self._wrong_knowledge()
        )

    # lives

    def _start_worker(self, shape: WorkerShape) -> None:
        self._lives[shape.name] += 1
        worker = WorkerNode(self.world, self.net, self.fabric, shape, self._lives[shape.name])
        self.workers[shape.name] = worker
        self.world.trace(shape.name, f"starts as {worker.incarnation}")
        worker.node.on_death.append(lambda: self._worker_died(worker))

    def _start_coordinator(self, name: str) -> None:
        self._lives[name] += 1
        config = CoordinatorConfig(
            executor="hash",
            queue_limit=16,
            slow_reader_bytes=4096,
            router=self.scenario.router,
            local_prefill_below=self.scenario.local_prefill_below,
        )
        coordinator = CoordinatorNode(self.world, self.net, name, self._lives[name], config)
        self.coordinators[name] = coordinator
        self.world.trace(name, f"starts as {coordinator.roster.coordinator_id}")
        coordinator.node.on_death.append(lambda: self._coordinator_died(name))

    def _coordinator_died(self, name: str) -> None:
        self.watch.disturb(name, 5.0)
        self._gone.append(self.coordinators[name])
        self._restart(lambda: self._start_coordinator(name))

    def _worker_died(self, worker: WorkerNode) -> None:
        self._take_counters(worker)
        self._gone.append(worker)
        self.lost_progress += worker.progress + 1
        if worker.departure.late:
            self.watch.late_departures.append(worker.shape.name)
        if worker.exited != 0:
            self.watch.disturb(worker.shape.name, 5.0)
        delay = self.plan.absent_s.pop(worker.shape.name, None)
        self._restart(lambda: self._start_worker(worker.shape), delay)

    def _restart(self, start: Callable[[], None], delay: float | None = None) -> None:
        """On the same address, with empty memory."""
        self._pending_starts += 1

        def again() -> None:
            self._pending_starts -= 1
            start()

        rng = self.world.rng
        self.world.after(rng.choice((0.01, 0.5, 2.0)) if delay is None else delay, again)

    def vanish(self, node: Node) -> None:
        """The host is lost without a word; another takes its address later. What it had on the wire stops with it."""
        self.world.trace(node.name, "vanishes with its host")
        self.watch.disturb(node.name, 45.0)
        self.net.vanish(node)
        node.crash("its host is gone")

    # looking

    def _look(self, node: Node | None) -> None:
        if node is None or node is self.clients.node:
            return
        worker = self.workers.get(node.name)
        if worker is not None and worker.node is node and node.alive:
            if worker.turned:
                worker.turned = False
                check_worker(worker)
            return
        coordinator = self.coordinators.get(node.name)
        if coordinator is not None and coordinator.node is node and node.alive:
            check_coordinator(coordinator)
            for task in coordinator.tasks:
                if task.done():
                    raise Violation(f"{node.name}: background task {task.get_name()} ended")

    def judge(self) -> None:
        """After the end: raises what is wrong with it."""
        left = [h.ask.name for h in self.clients.histories if h.ended_at is None]
        if left:
            raise Violation(f"streams {left} did not end within {SETTLE_S} s after the last fault")
        held = [line for w in self.workers.values() if w.node.alive and (line := holds_nothing(w))]
        if held:
            raise Violation(f"not given back within {SETTLE_S} s: {held}")
        if dead := self._dead_peers():
            raise Violation(f"memory of dead peers is kept: {dead}")
        if wrong := self._wrong_knowledge():
            raise Violation(f"what is cached is not known {SETTLE_S} s after the last fault: {wrong}")
        if not self.quiet:
            raise Violation(f"not quiet: pending starts {self._pending_starts}")
        for worker in self.workers.values():
            worker.pool.check_contents()
            self._take_counters(worker)
        coordinators = [*self.coordinators.values(), *(c for c in self._gone if isinstance(c, CoordinatorNode))]
        if words := shared_too_much(self.clients.histories, set[str]().union(*(c.first_try for c in coordinators))):
            raise Violation(words)
        self.counters["cached_tokens"] = self.clients.cached_tokens
        for coordinator in self.coordinators.values():
            self.counters.update({k: v for k, v in coordinator.dispatcher.counters.items() if "." not in k})
            if coordinator.dispatcher.counters["bugs"]:
                raise Violation("a request failed through a bug; see the coordinator's log")
        self._judge_counters()

    def _judge_counters(self) -> None:
        counters, faults = self.counters, self.scenario.faults
        for name in ("bad_manifest", "bad_frame", "unexpected_message", "unexpected_write_end", "bad_start"):
            if counters[name]:
                raise Violation(f"{name} is {counters[name]}, and nobody sends such a thing")
        if counters["forced"] and not self.plan.happened["vanish"]:
            raise Violation(f"{counters['forced']} tickets were forced, and no host vanished")
        if not faults - set(HARMLESS):
            wrong = [h.ask.name for h in self.clients.histories if h.outcome not in ("exact", "ResourceExhausted")]
            if wrong or counters["migrated"]:
                raise Violation(f"only {set(faults)}: {wrong} are not exact, {counters['migrated']} moves")

    def _dead_peers(self) -> list[str]:
        living = {w.incarnation for w in self.workers.values() if w.node.alive}
        transports = [w.transport for w in self.workers.values() if w.node.alive]
        return [p for t in transports if isinstance(t, OneSided) for p in t.peers if p not in living]

    def _wrong_knowledge(self) -> list[str]:
        """Of any coordinator about what any worker caches."""
        pairs = ((c, w) for c in self.coordinators.values() for w in self.workers.values())
        return [words for coordinator, worker in pairs if (words := knows_wrong(coordinator, worker))]

    def _take_counters(self, worker: WorkerNode) -> None:
        self.counters.update(dict(worker.core.load(worker.node.clock()).counters))

    def close(self) -> None:
        fault_points.install(None)
        for node in [*self.world.nodes, *self.world.graveyard]:
            for task in asyncio.all_tasks(node.loop):
                task._log_destroy_pending = False  # type: ignore[attr-defined]  # they end with their world
        for worker in [*self.workers.values(), *(w for w in self._gone if isinstance(w, WorkerNode))]:
            worker.executor.close()


def run_seed(seed: int, show: Callable[[str], None] | None = None) -> Outcome:
    """One seed from start to verdict."""
    with dropping_what_is_left():
        return _run(seed, show)


@contextmanager
def _bounds(scenario: Scenario) -> Iterator[None]:
    """What no seed is long enough to reach otherwise."""
    whole = cache_news.MOST_KEYS, cache_news.MOST_WAITING, prefix_index.MAX_HELD_KEYS
    if scenario.short_news:
        cache_news.MOST_KEYS, cache_news.MOST_WAITING, prefix_index.MAX_HELD_KEYS = 3, 6, 8
    try:
        yield
    finally:
        cache_news.MOST_KEYS, cache_news.MOST_WAITING, prefix_index.MAX_HELD_KEYS = whole


def _run(seed: int, show: Callable[[str], None] | None) -> Outcome:
    scenario = scenario_of(seed)
    with _bounds(scenario):
        return _live(scenario, show)


def _live(scenario: Scenario, show: Callable[[str], None] | None) -> Outcome:
    cluster, seed = SimCluster(scenario, show), scenario.seed
    outcome = Outcome(seed)
    try:
        cluster.start()
        cluster.load()
        world, until = cluster.world, cluster.scenario.fault_until_s + SETTLE_S
        world.run_until(lambda: cluster.quiet, until)
        cluster.judge()
    except Violation as violation:
        outcome.violation = str(violation)
    except Exception as error:
        outcome.violation = f"{type(error).__name__}: {error}"
        outcome.recent = (*_traceback(error),)
    finally:
        cluster.close()
    outcome.outcomes.update(h.outcome for h in cluster.clients.histories)
    outcome.faults = cluster.plan.happened
    outcome.counters = cluster.counters
    outcome.virtual_s, outcome.steps = cluster.world.now, cluster.world.steps
    if outcome.violation:
        outcome.recent = (*cluster.world.recent, *outcome.recent)
    return outcome


def _traceback(error: BaseException) -> list[str]:
    import traceback

    return "".join(traceback.format_exception(error)).splitlines()
