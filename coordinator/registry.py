"""Which workers are known and whom to dial: a pure (state, event, now) -> (state, actions). Knows no sockets.

Announcements only say where somebody may be; the session alone says who is alive. The first worker accepted fixes
layout and transport for all, until none is left.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from kvrelay.blocks import KVLayout, require_same
from kvrelay.errors import FailedPrecondition, KVRelayError, LayoutMismatch
from kvrelay.requests import Incarnation, Role, WorkerId
from kvrelay.session import PROTOCOL_VERSION, ModelIdentity, WorkerDescription

FORGET_S = 5.0
"""A worker without a session that has not announced itself for this long is forgotten."""
FIRST_REDIAL_S = 0.1
LONGEST_REDIAL_S = 2.0
STALLED_S = 1.2
"""A worker that missed two heartbeats gets nothing new, well before it is given up, and may be replaced."""


@dataclass(frozen=True, slots=True)
class Served:
    """What this coordinator serves; workers must agree."""

    model: ModelIdentity
    executor: str


@dataclass(frozen=True, slots=True)
class Known:
    """One worker. redial_at is set while there is no session and no dial under way."""

    description: WorkerDescription
    announced_at: float
    up: bool = False
    leaving: bool = False
    redial_at: float | None = None
    failures: int = 0


@dataclass(frozen=True, slots=True)
class Registry:
    served: Served
    workers: dict[WorkerId, Known] = field(default_factory=dict)

    @property
    def up(self) -> list[WorkerDescription]:
        """Workers with a session that are not about to go."""
        return [known.description for known in self.workers.values() if known.up and not known.leaving]


# Events


@dataclass(frozen=True, slots=True)
class Announced:
    """silent_s: for how long the worker known under this id has not been heard over its session, None without one."""

    description: WorkerDescription
    silent_s: float | None = None


@dataclass(frozen=True, slots=True)
class Leaving:
    worker_id: WorkerId
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class SessionUp:
    """The worker we dialled said welcome; it may have become somebody else since it announced itself."""

    dialled: Incarnation
    welcome: WorkerDescription


@dataclass(frozen=True, slots=True)
class SessionDown:
    worker_id: WorkerId
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class Tick:
    pass


Event = Announced | Leaving | SessionUp | SessionDown | Tick


# Actions


@dataclass(frozen=True, slots=True)
class Dial:
    description: WorkerDescription


@dataclass(frozen=True, slots=True)
class Hangup:
    worker_id: WorkerId
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class Refuse:
    """The answer to an announcement, or the reason for a hang-up. Names the field and both values."""

    worker_id: WorkerId
    error: KVRelayError


Action = Dial | Hangup | Refuse
Step = tuple[Registry, list[Action]]


def step(state: Registry, event: Event, now: float) -> Step:
    return _TABLE[type(event)](state, event, now)


def context_limit(state: Registry) -> int:
    """min(model context, tokens of the smallest pool of the workers that are up)."""
    pools = [d.num_blocks * d.layout.block_size for d in state.up]
    return min([state.served.model.max_context, *pools])


def mismatch(state: Registry, description: WorkerDescription) -> KVRelayError | None:
    """Why this worker cannot be paired with this coordinator and the workers it knows, or None."""
    pairs: list[tuple[str, object, object]] = [
        ("protocol_version", PROTOCOL_VERSION, description.protocol_version),
        ("executor", state.served.executor, description.executor),
        ("model.fingerprint", state.served.model.fingerprint, description.model.fingerprint),
        ("model.vocab_size", state.served.model.vocab_size, description.model.vocab_size),
        ("model.tokenizer_hash", state.served.model.tokenizer_hash, description.model.tokenizer_hash),
        ("model.max_context", state.served.model.max_context, description.model.max_context),
    ]
    others = [k.description for k in state.workers.values() if k.description.worker_id != description.worker_id]
    if others:
        pairs.append(("transport", others[0].transport, description.transport))
    for name, mine, theirs in pairs:
        if mine != theirs:
            return FailedPrecondition(
                f"worker {description.worker_id}: {name} differs: {mine!r} here, {theirs!r} there", field=name
            )
    unchecked = next((error for other in others if (error := _unchecked(other, description))), None)
    return unchecked or (_layout_mismatch(others[0].layout, description) if others else None)


def _unchecked(mine: WorkerDescription, theirs: WorkerDescription) -> KVRelayError | None:
    """A decode worker that checks its blocks takes none without checksums. The other way round is harmless."""
    prefill, decode = (mine, theirs) if mine.role is Role.PREFILL else (theirs, mine)
    if prefill.role is decode.role or prefill.verify_kv or not decode.verify_kv:
        return None
    return FailedPrecondition(
        f"worker {theirs.worker_id}: verify_kv differs: {mine.verify_kv} here ({mine.role} worker {mine.worker_id}), "
        f"{theirs.verify_kv} there",
        field="verify_kv",
    )


def _layout_mismatch(mine: KVLayout, description: WorkerDescription) -> KVRelayError | None:
    try:
        require_same(mine, description.layout, f"worker {description.worker_id}: layout")
    except LayoutMismatch as error:
        return LayoutMismatch(error.message, field=f"layout.{error.field}")
    return None


def _announced(state: Registry, event: Announced, now: float) -> Step:
    new = event.description
    error = mismatch(state, new)
    if error is not None:
        return state, [Refuse(new.worker_id, error)]
    old = state.workers.get(new.worker_id)
    if old is None:
        return _put(state, Known(new, now)), [Dial(new)]
    before = old.description
    if old.leaving and before.incarnation == new.incarnation:
        return state, []
    taken = _taken(old, event)
    if taken is not None:
        return state, [Refuse(new.worker_id, taken)]
    if (before.incarnation, before.address) == (new.incarnation, new.address):
        return _put(state, replace(old, announced_at=now)), []
    return _put(state, Known(new, now)), [Hangup(before.worker_id, before.incarnation), Dial(new)]


def _taken(old: Known, event: Announced) -> KVRelayError | None:
    """Why the id cannot be given to another process, or None.

    A live worker keeps it, unless it is about to go. One that is started again on the same address has taken that over
    from the one before, which must be dead, whatever its session looks like.
    """
    before, new = old.description, event.description
    if before.role != new.role and old.up:
        return FailedPrecondition(f"worker {new.worker_id}: id is in use by a {before.role} worker", field="worker_id")
    heard = old.up and event.silent_s is not None and event.silent_s < STALLED_S
    if old.leaving or not heard or before.incarnation == new.incarnation or before.address == new.address:
        return None
    return FailedPrecondition(
        f"worker {new.worker_id}: id is in use by a live worker at {before.address} (process {before.pid})",
        field="worker_id",
    )


def _leaving(state: Registry, event: Leaving, now: float) -> Step:
    """Nothing new goes to it; its session, if there is one, lives until the worker ends it."""
    known = state.workers.get(event.worker_id)
    if known is None or known.description.incarnation != event.incarnation:
        return state, []
    if not known.up:
        return _without(state, event.worker_id), [Hangup(event.worker_id, event.incarnation)]
    return _put(state, replace(known, leaving=True)), []


def _session_up(state: Registry, event: SessionUp, now: float) -> Step:
    welcome = event.welcome
    known = state.workers.get(welcome.worker_id)
    if known is None or known.description.incarnation != event.dialled:
        return state, [Hangup(welcome.worker_id, event.dialled)]
    error = mismatch(state, welcome)
    if error is None and welcome.role != known.description.role:
        error = FailedPrecondition(
            f"worker {welcome.worker_id}: role differs: announced {known.description.role}, is {welcome.role}",
            field="role",
        )
    if error is not None:
        hangup = Hangup(welcome.worker_id, event.dialled)
        return _without(state, welcome.worker_id), [Refuse(welcome.worker_id, error), hangup]
    return _put(state, replace(known, description=welcome, up=True, failures=0, redial_at=None)), []


def _session_down(state: Registry, event: SessionDown, now: float) -> Step:
    known = state.workers.get(event.worker_id)
    if known is None or known.description.incarnation != event.incarnation:
        return state, []
    if known.leaving:
        return _without(state, event.worker_id), []
    wait = min(LONGEST_REDIAL_S, FIRST_REDIAL_S * 2.0 ** min(known.failures, 16))
    return _put(state, replace(known, up=False, failures=known.failures + 1, redial_at=now + wait)), []


def _tick(state: Registry, event: Tick, now: float) -> Step:
    workers, actions = dict(state.workers), list[Action]()
    for worker_id, known in state.workers.items():
        if known.redial_at is None:
            continue
        if now - known.announced_at > FORGET_S:
            del workers[worker_id]
        elif now >= known.redial_at:
            workers[worker_id] = replace(known, redial_at=None)
            actions.append(Dial(known.description))
    return (replace(state, workers=workers) if workers != state.workers else state), actions


def _put(state: Registry, known: Known) -> Registry:
    return replace(state, workers={**state.workers, known.description.worker_id: known})


def _without(state: Registry, worker_id: WorkerId) -> Registry:
    return replace(state, workers={k: v for k, v in state.workers.items() if k != worker_id})


_TABLE: dict[type, Callable[[Registry, Any, float], Step]] = {
    Announced: _announced,
    Leaving: _leaving,
    SessionUp: _session_up,
    SessionDown: _session_down,
    Tick: _tick,
}
