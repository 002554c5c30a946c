"""Looks at a run as a whole: does something move, may this error be, who emitted that token. Reads, never acts."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from coordinator.dispatch import Dispatcher
from coordinator.live import Live
from coordinator.roster import RosterOwner
from kvrelay.errors import Aborted, DeadlineExceeded, KVRelayError, ResourceExhausted, Unavailable
from kvrelay.link import LEASE_S
from kvrelay.requests import RequestId, Role, WorkerId
from kvrelay.session import Report, TokenOut
from sim.waits import find_cycle
from sim.world import Node, Violation

if TYPE_CHECKING:
    from sim.clients import History
    from sim.cluster import SimCluster

STUCK_S = 55.0
"""With work open and nothing disturbed, something must have moved within this time (a lost host's blocks take 45 s)."""
STUCK_PASSES = 300_000
"""And within this many passes of nodes."""
CYCLE_EVERY = 500
CYCLE_S = 5.0
"""A cycle of waits that lasts this long is one; shorter ones are a snapshot between two steps."""
EXPLAINS_S = 8.0
"""A disturbance explains an error for so long: 2.5 s until it is seen, 4 s of grace, and a redial."""


class Watch:
    def __init__(self, cluster: SimCluster) -> None:
        self._cluster = cluster
        self._disturbed_until: dict[str, float] = {}
        self.late_departures: list[str] = []
        self._mark = -1
        self._moved_at = 0.0
        self._moved_pass = 0
        self._passes = 0
        self._cycle_since: float | None = None

    # what faults tell

    def disturb(self, name: str, seconds: float = 0.0) -> None:
        """A fault touches this node now, and for so long."""
        until = self._cluster.world.now + seconds
        self._disturbed_until[name] = max(until, self._disturbed_until.get(name, 0.0))

    def _disturbed(self, name: str, within_s: float) -> bool:
        return self._disturbed_until.get(name, -1e9) >= self._cluster.world.now - within_s

    # progress

    def look(self, node: Node | None) -> None:
        """After each step."""
        self._passes += 1
        if any(not self._disturbed(name, EXPLAINS_S) for name in self.late_departures):
            raise Violation(f"{self.late_departures} ended later than their grace")
        self.late_departures.clear()
        if self._passes % 50:
            return
        cluster = self._cluster
        clients, workers = cluster.clients, cluster.workers.values()
        mark = sum(h.num_tokens + (h.ended_at is not None) * 1000 for h in clients.histories)
        mark += sum(w.progress for w in workers) + cluster.lost_progress + len(cluster.plan.happened)
        now = cluster.world.now
        if mark != self._mark or not clients.num_open:
            self._mark, self._moved_at, self._moved_pass = mark, now, self._passes
        calm_since = max([self._moved_at, *self._disturbed_until.values()])
        if now - calm_since > STUCK_S:
            raise Violation(f"nothing moves for {STUCK_S} s; {clients.num_open} streams are open; {self._picture()}")
        if self._passes - self._moved_pass > STUCK_PASSES:
            raise Violation(f"nothing moved in {STUCK_PASSES} passes; {self._picture()}")
        if self._passes % CYCLE_EVERY == 0:
            self._look_for_cycle(now)

    def _look_for_cycle(self, now: float) -> None:
        stuck = find_cycle(w for w in self._cluster.workers.values() if w.node.alive)
        if not stuck:
            self._cycle_since = None
        elif self._cycle_since is None:
            self._cycle_since = now
        elif now - self._cycle_since > CYCLE_S and now - self._moved_at > CYCLE_S:
            raise Violation(f"a cycle of waits for {now - self._cycle_since:.1f} s: {sorted(stuck)}; {self._picture()}")

    def _picture(self) -> str:
        loads = (w.core.load(w.node.clock()) for w in self._cluster.workers.values() if w.node.alive)
        return "; ".join(f"{x.blocks} running {x.running} waiting {x.waiting}" for x in loads)

    # errors

    def judge_error(self, history: History, error: KVRelayError) -> None:
        """Raises a violation for an error that nothing explains."""
        if not self._explains(history, error):
            raise Violation(f"{history.ask.name} ends with {type(error).__name__} ({error}), which nothing explains")

    def _explains(self, history: History, error: KVRelayError) -> bool:
        cluster, now = self._cluster, self._cluster.world.now
        if any(self._disturbed(name, EXPLAINS_S) for name in cluster.scenario.coordinators):
            return True
        if history.read_pause_s and any(
            self._disturbed(name, now - history.started_at) for name in cluster.scenario.coordinators
        ):
            return True  # it reads only now what was said before
        if isinstance(error, DeadlineExceeded):
            limit = history.ask.deadline_s
            took = now - history.started_at
            return (
                limit is not None and limit * 0.98 <= took and (took <= limit * 1.02 + 1.0 or history.read_pause_s > 0)
            )
        if isinstance(error, ResourceExhausted):
            return history.read_pause_s > 0 or self._slow_messages() or "that is the limit" in error.message
        if isinstance(error, Aborted):
            return sum(cluster.plan.happened.values()) + cluster.net.num_cut >= 4 or self._short_leases()
        return isinstance(error, Unavailable) and self._decode_disturbed()

    def _slow_messages(self) -> bool:
        """A message that is long under way stops its stream's window, as a reader does that is slow."""
        return "slow" in self._cluster.scenario.faults and self._cluster.world.now < self._cluster.plan.slow_until

    def _short_leases(self) -> bool:
        return any(w.lease_s < LEASE_S for w in self._cluster.scenario.workers)

    def _decode_disturbed(self) -> bool:
        """All of them; without prefill workers decode alone goes on."""
        names = [w.name for w in self._cluster.scenario.workers if w.role is Role.DECODE]
        return all(self._disturbed(name, EXPLAINS_S) for name in names)


class EmissionCheck:
    """Stands between roster and dispatcher: a token counts only from the attempt that was current when it came."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    def on_report(self, worker: WorkerId, report: Report) -> None:
        before: dict[RequestId, tuple[Live, int, int]] = {}
        own: Counter[RequestId] = Counter()
        for token in report.tokens:
            live = self._who(token)
            if live is not None:
                before.setdefault(live.id, (live, len(live.journal), live.state.attempt))
                own[live.id] += token.attempt == live.state.attempt
        self._dispatcher.on_report(worker, report)
        for live, length, attempt in before.values():
            if live.children:
                self._forked(live, worker)
            placed = live.state.placement
            grew = len(live.journal) - length
            if grew > own[live.id]:
                raise Violation(f"{live.id}: {grew} tokens were taken, {own[live.id]} are of attempt {attempt}")
            if grew and placed is not None and placed.role_of(worker) is None:
                raise Violation(f"{live.id}: a token of {worker} was taken, which has no part in it")

    def _who(self, token: TokenOut) -> Live | None:
        """The request of this id, or the sequence that workers still know by it."""
        live = self._dispatcher._live.get(token.request_id)
        return live or self._dispatcher._families.child(token.request_id, token.attempt, token.sequence)

    @staticmethod
    def _forked(prompt: Live, worker: WorkerId) -> None:
        """With this report: then each sequence has its first token, from a worker of the placement."""
        short = [child.id for child in prompt.children if not len(child.journal)]
        placed = prompt.state.placement
        if len(prompt.children) != prompt.facts.n or short or placed is None or placed.role_of(worker) is None:
            raise Violation(f"{prompt.id} forked into {len(prompt.children)} through {worker}; no token in {short}")

    def on_worker_lost(self, worker: WorkerId, why: str) -> None:
        self._dispatcher.on_worker_lost(worker, why)

    def on_change(self) -> None:
        self._dispatcher.on_change()


def _is_owner(check: EmissionCheck) -> RosterOwner:
    return check
