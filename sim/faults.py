"""What goes wrong and when: drawn from the seed, carried out on nodes, network and fabric. Counts what it did.

A fault that could not be carried out is not counted; a seed's record says how often each kind really happened.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import TYPE_CHECKING

from kvrelay import fault_points
from kvrelay.errors import NotFound
from kvrelay.requests import Role, WorkerId
from kvrelay.session import Drain
from sim.network import SLOWEST_MESSAGE_S, End
from sim.world import Node, NodeDied
from worker.events import DrainAsked

if TYPE_CHECKING:
    from sim.cluster import SimCluster

MOMENTS = ("crash", "pause", "jump", "clog", "vanish", "coordinator", "drain", "cut", "stall", "nap", "no_prefill")
POINT_CHANCE = 0.004
CUT_CHANCES = {"session": 0.002, "link": 0.02, "announce": 0.02, "blocks": 0.2}


class FaultPlan:
    """Starts with the cluster, ends at `until`; then `heal` lets everything work again."""

    def __init__(self, cluster: SimCluster) -> None:
        self.cluster = cluster
        self.world = cluster.world
        self.scenario = cluster.scenario
        self.happened: Counter[str] = Counter()
        self.active = False
        self.slow_until = float("inf")
        self.absent_s: dict[str, float] = {}
        """Workers that die now, and after how long they start again."""
        self._resting: set[Node] = set()

    def start(self) -> None:
        kinds, net, fabric = self.scenario.faults, self.cluster.net, self.cluster.fabric
        self.active = True
        net.window = self.scenario.window
        net.may_cut = self._may_cut
        net.cut_chance = dict(CUT_CHANCES) if "cut" in kinds else {}
        net.slow_chance = 0.02 if "slow" in kinds else 0.0
        if "write" in kinds:
            fabric.faults.fail = self.world.rng.choice((0.02, 0.2))
            fabric.faults.duplicate = 0.2
            fabric.faults.late_notice = 0.2
            fabric.faults.slow = self.world.rng.choice((0.01, 0.05, 0.2))
            fabric.faults.refuse_post = 0.02
        self.world.slow_step_chance = 0.04 if "slow_step" in kinds else 0.002
        if "flip" in kinds and self.scenario.workers[0].verify_kv:
            fabric.faults.flip = 0.02
        fault_points.install(self._point if "point" in kinds else None)
        if any(kind in kinds for kind in MOMENTS):
            self._next()
        self.world.at(self.scenario.fault_until_s, self.heal)

    def heal(self) -> None:
        if self.active:
            self.active = False
            self.slow_until = self.cluster.world.now + 2 * SLOWEST_MESSAGE_S
            net, fabric = self.cluster.net, self.cluster.fabric
            net.cut_chance, net.slow_chance = {}, 0.0
            faults = fabric.faults
            faults.fail = faults.duplicate = faults.late_notice = faults.slow = faults.refuse_post = faults.flip = 0.0
            net.unclog()
            fault_points.install(None)
            self.happened["cut"] = net.num_cut
            self.happened["flip"] = fabric.counts.get("flipped", 0)
            self.happened["write"] = fabric.counts.get("failed_write", 0)
            self.world.trace("faults", f"end: {dict(self.happened)}")

    def _next(self) -> None:
        wait = self.world.rng.expovariate(1.0 / self.scenario.fault_every_s)
        self.world.after(wait, self._moment)

    def _moment(self) -> None:
        if not self.active:
            return
        kind = self.world.rng.choice([k for k in MOMENTS if k in self.scenario.faults])
        getattr(self, f"_{kind}")()
        self._next()

    # the kinds

    def _crash(self) -> None:
        writing = [node for pair in self.cluster.fabric.pairs_writing() for node in pair if node.alive]
        worker = self.world.rng.choice(writing) if writing and self.world.rng.random() < 0.5 else self._worker()
        if worker is not None:
            self.happened["crash"] += 1
            worker.crash("killed")

    def _coordinator(self) -> None:
        alive = [c for c in self.cluster.coordinators.values() if c.node.alive]
        if len(alive) > 1 or (alive and self.world.rng.random() < 0.3):
            self.happened["coordinator"] += 1
            self.world.rng.choice(alive).node.crash("killed")

    def _no_prefill(self) -> None:
        """All prefill workers die and stay away for a while: decode alone goes on."""
        workers = [w for w in self.cluster.workers.values() if w.shape.role is Role.PREFILL]
        if workers and all(w.node.alive for w in workers):
            self.happened["no_prefill"] += 1
            seconds = self.world.rng.choice((0.5, 6.0, 15.0))
            for worker in workers:
                self.absent_s[worker.shape.name] = seconds
                worker.node.crash(f"all of its role die, for {seconds} s")

    def _drain(self) -> None:
        """A rolling restart: a worker is told to go, by a signal or by a coordinator, while its kind has another."""
        workers = [w for w in self.cluster.workers.values() if w.node.alive and w.departure.times is None]
        rng = self.world.rng
        if len(workers) < len(self.cluster.workers):
            return
        worker, grace_s = rng.choice(workers), rng.choice((0.5, 2.0, 8.0))
        self.happened["drain"] += 1
        self.world.trace(worker.shape.name, f"is told to drain within {grace_s} s")
        if rng.random() < 0.5:
            worker.mailbox.post(DrainAsked(grace_s))
            return
        coordinator = rng.choice(list(self.cluster.coordinators.values()))
        with contextlib.suppress(NotFound):
            coordinator.roster.drain(WorkerId(worker.shape.name), Drain(grace_s))

    def _cut(self) -> None:
        """The link of a write that is under way, if there is one, else any connection between processes."""
        rng, net = self.world.rng, self.cluster.net
        pairs = self.cluster.fabric.pairs_writing()
        links = [e for e in net.ends if e.kind == "link" and (e.node, e.peer.node) in pairs]
        ends = links or [e for e in net.ends if e.kind in ("session", "link")]
        if ends:
            end = rng.choice(ends)
            if self._may_cut(end):
                net.cut(end)

    def _vanish(self) -> None:
        worker = self._worker()
        if worker is not None and self.happened["vanish"] < 2:
            self.happened["vanish"] += 1
            self.cluster.vanish(worker)

    def _pause(self) -> None:
        """Short stalls, long ones, and silence that a supervisor ends."""
        rng = self.world.rng
        seconds = rng.choice((rng.uniform(0.05, 0.9), rng.uniform(0.05, 0.9), rng.uniform(1.0, 4.0), 20.0))
        self._stand_still("pause", self._any_node(), seconds)

    def _stall(self) -> None:
        self._stand_still("stall", self._any_node(), self.world.rng.uniform(0.05, 1.0))

    def _nap(self) -> None:
        alive = [c.node for c in self.cluster.coordinators.values() if c.node.alive]
        if alive:
            self._stand_still("nap", self.world.rng.choice(alive), self.world.rng.uniform(1.0, 8.0))

    def _stand_still(self, kind: str, node: Node | None, seconds: float) -> None:
        if node is None or node.paused or node in self._resting:
            return
        self.happened[kind] += 1
        self.world.trace(node.name, f"stands still for {seconds:.2f} s")
        node.paused = True

        def go_on() -> None:
            node.paused = False
            self._rest(node, 2.0)

        self.world.after(seconds, go_on)
        self.cluster.watch.disturb(node.name, seconds)
        if seconds > 10.0:
            self.world.after(10.0, lambda: node.crash("silent for 10 s, killed by its supervisor"))

    def _jump(self) -> None:
        node = self._any_node()
        if node is not None and node not in self._resting:
            self.happened["jump"] += 1
            self._rest(node, 6.0)
            seconds = self.world.rng.uniform(0.1, 5.0)
            self.world.trace(node.name, f"its clock jumps by {seconds:.2f} s")
            node.jump(seconds)
            self.cluster.watch.disturb(node.name)

    def _rest(self, node: Node, seconds: float) -> None:
        """Not again so soon: two stalls or leaps in a row would be a longer one."""
        self._resting.add(node)
        self.world.after(seconds, lambda: self._resting.discard(node))

    def _clog(self) -> None:
        nodes = [node for node in self.world.nodes if node is not self.cluster.clients.node]
        if len(nodes) > 1:
            a, b = self.world.rng.sample(nodes, 2)
            seconds = self.world.rng.choice((0.3, 1.0, 4.0, 8.0))
            self.happened["clog"] += 1
            self.world.trace("network", f"nothing goes from {a.name} to {b.name} for {seconds} s")
            self.cluster.net.clog(a.name, b.name, seconds)
            self.cluster.watch.disturb(a.name, seconds)
            self.cluster.watch.disturb(b.name, seconds)
            if self.world.rng.random() < 0.5:
                self.cluster.net.clog(b.name, a.name, seconds)

    def _point(self, name: str) -> None:
        """A process dies in the middle of its code."""
        node = self.world.running
        if self.active and node is not None and node.alive and self.world.rng.random() < POINT_CHANCE:
            self.happened["point"] += 1
            node.crash(f"at {name}")
            raise NodeDied

    # who

    def _worker(self) -> Node | None:
        alive = [w.node for w in self.cluster.workers.values() if w.node.alive]
        return self.world.rng.choice(alive) if alive else None

    def _any_node(self) -> Node | None:
        nodes = [n for n in self.world.nodes if n is not self.cluster.clients.node]
        return self.world.rng.choice(nodes) if nodes else None

    def _may_cut(self, end: End) -> bool:
        """Nothing but the two kernels closes a link while one of its processes stands still (docs/hand-off.md)."""
        if end.kind == "generate" or (end.kind == "link" and (end.node.paused or end.peer.node.paused)):
            return False
        for side in (end, end.peer):
            self.cluster.watch.disturb(side.node.name)
        return True
