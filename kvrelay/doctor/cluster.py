"""Verdicts on a running cluster: is everybody there, heard, awake and of one kind. Pure; asks nobody."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvrelay.doctor.finding import Finding, Verdict
from kvrelay.session import COORDINATOR_GIVES_UP_S

SILENT_S = 1.2
"""A worker that was not heard for so long has missed two heartbeats, and gets nothing new."""
SLOW_ROUND_TRIP_S = 0.05
ROUGH_CLOCK_S = 0.005
MIXED = ("model", "layout", "transport", "executor", "protocol_version")
"""What must be the same everywhere, or prefill and decode do not pair."""


@dataclass(frozen=True, slots=True)
class Worker:
    """One worker as its coordinator tells and as it answers us. health: SERVING, NOT_SERVING, or why it is silent.

    round_trip_s: the shortest of several to it, None without an answer. clock_offset_s: its monotonic clock and this
    are the coordinator's, give or take clock_error_s; both None while the coordinator does not know.
    """

    worker_id: str
    role: str
    address: str
    model: str
    layout: str
    transport: str
    executor: str
    protocol_version: str
    prefix_cache: bool
    verify_kv: bool
    silent_s: float
    draining: bool
    quarantined: int
    health: str
    round_trip_s: float | None
    clock_offset_s: float | None = None
    clock_error_s: float | None = None


def judge_reached(target: str, round_trips_s: Sequence[float], error: str) -> Finding:
    """round_trips_s: of GetTopology, at least one unless there is an error."""
    if error:
        advice = "is it started, is the address right, does a firewall stand between?"
        return Finding("coordinator", Verdict.PROBLEM, f"{target} does not answer: {error}", advice)
    best = min(round_trips_s)
    what = f"{target} answers in {best * 1e3:.1f} ms (of {len(round_trips_s)}), {max(round_trips_s) * 1e3:.1f} at worst"
    figures = {"round_trips_s": list(round_trips_s)}
    if best > SLOW_ROUND_TRIP_S:
        advice = "every token of every stream passes there: look at the network and what else runs there"
        return Finding("coordinator", Verdict.WARNING, f"{what}: slow", advice, figures)
    return Finding("coordinator", Verdict.OK, what, figures=figures)


def judge_cluster(workers: Sequence[Worker]) -> list[Finding]:
    """One finding for the pools, one a worker, one for each kind of mixture."""
    return [_judge_roles(workers), *(judge_worker(worker) for worker in workers), *judge_mixed(workers)]


def _judge_roles(workers: Sequence[Worker]) -> Finding:
    counts = {role: sum(worker.role == role for worker in workers) for role in ("prefill", "decode")}
    what = ", ".join(f"{count} {role}" for role, count in counts.items())
    missing = [role for role, count in counts.items() if not count]
    if missing:
        advice = f"start one: kvrelay {missing[0]} --coordinator HOST:PORT"
        return Finding("workers", Verdict.PROBLEM, f"{what}: no request can be served", advice, dict(counts))
    return Finding("workers", Verdict.OK, what, figures=dict(counts))


def judge_worker(worker: Worker) -> Finding:
    """The worst of what there is to say about it decides the verdict; all of it is said."""
    said = list(_remarks(worker))
    verdict = max((v for v, _, _ in said), key=list(Verdict).index, default=Verdict.OK)
    trip = "" if worker.round_trip_s is None else f", answers in {worker.round_trip_s * 1e3:.1f} ms"
    trip += "" if worker.clock_error_s is None else f", clock known to {worker.clock_error_s * 1e3:.1f} ms"
    what = "; ".join([f"{worker.role}, heard {worker.silent_s:.1f} s ago{trip}", *(text for _, text, _ in said)])
    advice = "; ".join(dict.fromkeys(advice for _, _, advice in said))
    figures = {
        "silent_s": worker.silent_s,
        "round_trip_s": worker.round_trip_s,
        "clock_offset_s": worker.clock_offset_s,
        "clock_error_s": worker.clock_error_s,
    }
    return Finding(worker.worker_id, verdict, what, advice, figures)


def _remarks(worker: Worker) -> list[tuple[Verdict, str, str]]:
    """(verdict, what, advice) of everything that is not as it should be."""
    found = []
    look = f"see its log, and kvrelay health {worker.address}"
    if worker.silent_s > COORDINATOR_GIVES_UP_S:
        found.append((Verdict.PROBLEM, "silent: its requests move to others", look))
    elif worker.silent_s > SILENT_S:
        found.append((Verdict.WARNING, "silent: gets nothing new", look))
    if worker.health == "NOT_SERVING" and not worker.draining:
        found.append((Verdict.PROBLEM, "says NOT_SERVING: nothing moves although there is work", look))
    elif worker.health not in {"SERVING", "NOT_SERVING"}:
        advice = "if the cluster's network is closed to this host this means nothing; else " + look
        found.append((Verdict.WARNING, f"does not answer from here: {worker.health}", advice))
    elif worker.round_trip_s is not None and worker.round_trip_s > SLOW_ROUND_TRIP_S:
        found.append((Verdict.WARNING, "slow to answer", "look at the network and what else runs there"))
    if worker.clock_error_s is not None and worker.clock_error_s > ROUGH_CLOCK_S:
        rough = f"its clock is known to {worker.clock_error_s * 1e3:.0f} ms only, and so are causes of late tokens"
        found.append((Verdict.WARNING, rough, "look at the network between it and the coordinator"))
    if worker.draining:
        found.append((Verdict.WARNING, "draining: takes nothing new", "start another one where nobody does"))
    if not worker.prefix_cache:
        found.append((Verdict.WARNING, "caches no prompts", "start it without --no-prefix-cache"))
    if worker.quarantined:
        blocks = f"{worker.quarantined} blocks quarantined"
        found.append((Verdict.WARNING, blocks, "they come back when their writer answers or is gone"))
    return found


def judge_mixed(workers: Sequence[Worker]) -> list[Finding]:
    """A finding for each thing in which workers differ although it must be one, naming who has which."""
    found = []
    for name in MIXED:
        having: dict[str, list[str]] = {}
        for worker in workers:
            having.setdefault(str(getattr(worker, name)), []).append(worker.worker_id)
        if len(having) > 1:
            who = "; ".join(f"{value}: {', '.join(ids)}" for value, ids in having.items())
            advice = f"start all workers with the same {name.replace('_', ' ')}"
            found.append(Finding("mixed pools", Verdict.PROBLEM, f"{name} differs: {who}", advice))
    plain = [worker.worker_id for worker in workers if worker.role == "prefill" and not worker.verify_kv]
    strict = [worker.worker_id for worker in workers if worker.role == "decode" and worker.verify_kv]
    if plain and strict:
        what = f"{', '.join(strict)} check KV blocks, {', '.join(plain)} send no checksums"
        found.append(Finding("mixed pools", Verdict.PROBLEM, what, "give --verify-kv to all of them, or to none"))
    return found
