"""Who is placed next of those that wait, and who may pass a head that has no room. Pure; knows no clocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.router import DEFAULT_RULES, Routed, Rules, lacks, route
from coordinator.views import Snapshot, Want
from kvrelay.requests import Role

PASS_S = 2.0
"""How long smaller requests may pass a blocked head of the queue."""
BLOCK_TOKENS = 16
"""What each further sequence of a prompt counts when the sizes of requests are compared."""
LOOK_AHEAD = 64
"""How many requests behind a blocked head are looked at."""
LOOKS_INTO_CACHES = 8
"""How many of them with keys: who caches a prompt of 16,000 tokens is found in 0.1 ms, for every report of a worker."""


def next_to_place(
    queue: Sequence[Want], snapshot: Snapshot, now: float, rules: Rules = DEFAULT_RULES
) -> tuple[int, Routed] | None:
    """Position in the queue and placement of the request to place next, None when nobody can be placed now.

    The first in the queue goes first; past it, if it has been blocked for less than PASS_S, smaller requests may go
    that are of no lower class. Others, and later all, only if they take nothing from it: no worker of a role that it
    waits for.
    """
    head: _Blocked | None = None
    looks = 0
    for position, want in enumerate(queue[:LOOK_AHEAD]):
        if want.not_before > now or (head is not None and not head.may_be_passed(want, rules)):
            continue
        if head is not None and want.keys:
            looks += 1
            if looks > LOOKS_INTO_CACHES:
                continue
        routed = route(snapshot, want, rules)
        if routed is not None and (head is None or not routed.roles & head.kept_from(want)):
            return position, routed
        if head is None:
            late = want.blocked_since is not None and now - want.blocked_since >= PASS_S
            keeps = late or any(other.priority < want.priority for other in queue)
            head = _Blocked(want, late, lacks(snapshot, want, rules) if keeps else frozenset())
    return None


@dataclass(frozen=True, slots=True)
class _Blocked:
    """The head of the queue when it has no room. lacks: roles that it waits for, if anybody is to be kept from them."""

    want: Want
    late: bool
    lacks: frozenset[Role]

    def kept_from(self, want: Want) -> frozenset[Role]:
        """Roles of which it may take no worker: those behind a head that is late, and those of a lower class."""
        return self.lacks if self.late or want.priority < self.want.priority else frozenset()

    def may_be_passed(self, want: Want, rules: Rules) -> bool:
        """Whether there is any sense in looking for a placement."""
        lacks = self.kept_from(want)
        if not lacks:
            return _size(want) < _size(self.want)
        return not (
            (Role.DECODE in lacks and want.needs_decode) or (Role.PREFILL in lacks and rules.local_prefill_below == 0)
        )


def _size(want: Want) -> int:
    """In tokens; each further sequence takes a block of its own."""
    return want.num_tokens + BLOCK_TOKENS * (want.num_sequences - 1)
