"""When the queue is looked at: the router's word becomes a placement, and who waits in vain is told. Knows no streams.

The router looks at the line whenever something changed, once per turn of the loop, and at each newcomer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import structlog

from coordinator import events as ev
from coordinator.admission import NO_WORKER_GRACE_S, RETRY_AFTER_S, Admission
from coordinator.live import Live
from coordinator.roster import Roster
from coordinator.router import Routed
from coordinator.waiting import WaitingLine
from kvrelay.errors import Internal, Unavailable

log = structlog.get_logger("coordinator.placing")


class Placing:
    """feed: takes what is decided of a request as an event of its lifecycle."""

    def __init__(
        self, roster: Roster, queue: WaitingLine, admission: Admission, feed: Callable[[Live, ev.Event], None]
    ) -> None:
        self._roster = roster
        self._queue = queue
        self._admission = admission
        self._feed = feed
        self._scheduled = False

    def on_change(self) -> None:
        """Something may let the router place a request: look at the queue once in this turn of the loop."""
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self.pump)

    def look(self, now: float) -> None:
        """Which roles have a worker. Who waits for one that went is told as soon as the wait has become hopeless."""
        if self._admission.look(self._roster.has, now):
            at = now + NO_WORKER_GRACE_S
            asyncio.get_running_loop().call_at(at, self.sweep, at)

    def sweep(self, now: float) -> None:
        """Ends those that wait for workers that will not come."""
        self.look(now)
        for live in self._queue.lives():
            missing = self._admission.hopeless(live.needs_decode, now)
            if missing:
                before = f": {live.lost[-1].loss.words}" if live.lost and live.lost[-1].loss else ""
                error = Unavailable(f"no {missing} is left{before}", retry_after_s=RETRY_AFTER_S)
                self._feed(live, ev.StreamFailed(error))

    def add(self, live: Live) -> None:
        """A new request: it is placed at once if it can be.

        Whoever waits already had no room when the line was looked at last, and what may have made room since has
        scheduled another look. So a burst does not have the whole line looked at for each of its requests.
        """
        self._queue.add(live)
        if self._scheduled or self._queue.is_far_behind(live):
            return
        now = time.monotonic()
        try:
            found = self._queue.take_newcomer(live, self._roster.snapshot(), now)
        except Exception:
            self._end_who_raised(now)
            self.on_change()
            return
        if found is not None:
            self._place(*found, now)
            if found[0] is not live:
                self.on_change()

    def pump(self) -> None:
        """Places requests until nobody can be placed."""
        self._scheduled = False
        self.look(time.monotonic())
        while self._queue:
            now = time.monotonic()
            try:
                found = self._queue.take(self._roster.snapshot(), now)
            except Exception:
                self._end_who_raised(now)
                continue
            if found is None:
                return
            self._place(*found, now)

    def _end_who_raised(self, now: float) -> None:
        """A bug of ours in the look at the line: it ends one request and holds up none of the others."""
        live = self._queue.stumbled_over(self._roster.snapshot(), now)
        if live is not None:
            self._end(live)

    def _end(self, live: Live) -> None:
        log.exception("a request could not be placed", request=live.id)
        self._feed(live, ev.StreamFailed(Internal("internal error; see the server's log")))
        self._queue.remove(live)  # whatever became of that: the line goes on

    def _place(self, live: Live, routed: Routed, now: float) -> None:
        placement = routed.placement
        live.attempt.placement, live.attempt.routed_at = placement, now
        workers = [worker for worker in (placement.prefill, placement.decode) if worker is not None]
        try:
            for worker in workers:
                self._roster.assign(worker, live.id, routed.share(worker))
        except Exception:
            self._end(live)  # it is in the line no more, so nobody would come back to it
            for worker in workers:
                self._roster.release(worker, live.id)
            return
        live.attempt.placed_at = time.monotonic()
        self._feed(live, ev.Place(placement, live.journal.token_ids))
