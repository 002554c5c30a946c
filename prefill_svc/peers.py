"""Which decode workers this one is linked to, which it dials again, which it forgets. Pure: knows no sockets.

A lost link is dialled again at once while a hand-off to the peer has not ended: an answer means that the peer lives.
When none is left the transport lets go of the peer, and of its memory, unless a link is on its way that it does not
know of yet (worker.link_client); then it does so with the end of that.
"""

from __future__ import annotations

from collections.abc import Callable

from kvrelay.requests import Incarnation
from worker.events import DropPeer, OpenLink

REDIAL_S = 0.2


class Peers:
    """busy_with: whether a hand-off to an incarnation has not ended."""

    def __init__(self, busy_with: Callable[[Incarnation], bool]) -> None:
        self._busy_with = busy_with
        self._targets: dict[Incarnation, OpenLink] = {}
        self._redials: dict[Incarnation, float] = {}

    def want(self, target: OpenLink) -> OpenLink:
        """A hand-off to this peer begins."""
        self._targets[target.peer] = target
        self._redials.pop(target.peer, None)
        return target

    def lost(self, peer: Incarnation, now: float) -> None:
        """Its link ended, or could not be made. Perhaps nobody wants it any more, as its hand-off ended while it was
        dialled again; the transport may know the peer all the same.
        """
        self._redials[peer] = now if peer not in self._redials else now + REDIAL_S

    def due(self, now: float) -> list[OpenLink | DropPeer]:
        """What is to be done about lost peers now."""
        actions: list[OpenLink | DropPeer] = []
        for peer, at in list(self._redials.items()):
            if not self._busy_with(peer):
                del self._redials[peer]
                self._targets.pop(peer, None)
                actions.append(DropPeer(peer))
            elif at <= now:
                self._redials[peer] = now + REDIAL_S
                actions.append(self._targets[peer])
        return actions

    def linked(self, peer: Incarnation) -> None:
        """Its link is up."""
        self._redials.pop(peer, None)

    def next_due(self) -> float | None:
        return min(self._redials.values(), default=None)
