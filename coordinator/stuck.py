"""Workers that say for long that they are unwell, as their engines hang: they live, and compute nothing. Pure.

A worker that is unwell gets nothing new. One long step may be all there is to it, so what it has waits for it; once it
has been unwell for GIVEN_UP_S it counts as lost, as a silent one does: what it has moves, and its role does without it
until it says that it is well.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvrelay.liveness import Liveness
from kvrelay.requests import Incarnation, WorkerId
from kvrelay.session import HEARTBEAT_S, Load, WorkerDescription

GIVEN_UP_S = 10.0
"""Beside the nine seconds after which it calls itself unwell; `kvrelay up` has killed it by then."""


Life = tuple[WorkerId, Incarnation]


class Stuck:
    """What workers said of themselves. Given up ones are remembered over their sessions, for as long as they live."""

    def __init__(self) -> None:
        self._well: dict[Life, Liveness] = {}
        self._given_up: set[Life] = set()

    def heard(self, about: WorkerDescription, load: Load, now: float) -> bool:
        """With every load, some twice a second; our own pauses do not count. True once when it is to be given up."""
        life = _life(about)
        if not load.unwell:
            self._well.pop(life, None)
            self._given_up.discard(life)
            return False
        state = self._well.get(life) or Liveness.start(GIVEN_UP_S, now)
        self._well[life], gone = state.check(now, HEARTBEAT_S)
        if not gone or life in self._given_up:
            return False
        self._given_up.add(life)
        return True

    def is_given_up(self, about: WorkerDescription) -> bool:
        return _life(about) in self._given_up

    def keep(self, known: Iterable[WorkerDescription]) -> None:
        """Forgets all others: they will not come back."""
        if self._well:
            lives = {_life(about) for about in known}
            self._well = {life: state for life, state in self._well.items() if life in lives}
            self._given_up &= lives


def _life(about: WorkerDescription) -> Life:
    return about.worker_id, about.incarnation
