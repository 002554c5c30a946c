"""How busy a worker is, as far as the router may know: its last report and what was assigned since. Knows no sessions.

A report made before a command arrived knows nothing of it, so an assignment counts on top of the reported load until
the worker has answered it (decode: Reserved) or two loads came after it was sent (prefill).
"""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.views import DecodeView, PrefillView, Share
from kvrelay.blocks import blocks_for
from kvrelay.requests import RequestId
from kvrelay.session import Load, WorkerDescription

LOADS_UNTIL_SEEN = 2


@dataclass(slots=True)
class _Assignment:
    share: Share
    loads_left: int | None = None
    """Loads until the worker's own figures contain it; None: not sent, or not answered."""


class WorkerLoad:
    """One session's worth of book-keeping; a new session starts a new one."""

    def __init__(self, description: WorkerDescription) -> None:
        self.description = description
        self.load: Load | None = None
        self.last_assigned = 0
        self._assigned: dict[RequestId, _Assignment] = {}

    def assign(self, request_id: RequestId, share: Share, serial: int) -> None:
        self._assigned[request_id] = _Assignment(share)
        self.last_assigned = serial

    def sent(self, request_id: RequestId) -> None:
        """The command is on its way: from the second load on it is in the worker's figures."""
        if request_id in self._assigned:
            self._assigned[request_id].loads_left = LOADS_UNTIL_SEEN

    def answered(self, request_id: RequestId) -> None:
        """The worker has it in its figures from now on."""
        if request_id in self._assigned:
            self._assigned[request_id].loads_left = 0

    def release(self, request_id: RequestId) -> None:
        self._assigned.pop(request_id, None)

    def reported(self, load: Load) -> None:
        self.load = load
        for assignment in self._assigned.values():
            if assignment.loads_left:
                assignment.loads_left -= 1

    def prefill_view(self, silent: bool, leaving: bool = False) -> PrefillView:
        """ticketed_tokens is never more than what was assigned here: a stale report must not hold up the queue."""
        load = self.load
        leaving = leaving or (load is not None and load.draining)
        total = sum(a.share.to_compute for a in self._assigned.values())
        queued = self._reported_queue() + sum(share.to_compute for share in self._unseen())
        return PrefillView(
            worker_id=self.description.worker_id,
            queued_tokens=queued,
            ticketed_tokens=min(total, queued),
            step_tokens=self.description.step_tokens,
            usable=self.takes_requests(silent or leaving),
            last_assigned=self.last_assigned,
            total_blocks=self.description.num_blocks,
            block_size=self.description.layout.block_size,
            filled=1.0 - load.blocks.free / load.blocks.total if load and load.blocks.total else 0.0,
            leaving=leaving,
        )

    def decode_view(self, silent: bool) -> DecodeView:
        load = self.load
        size = self.description.layout.block_size
        unseen = self._unseen()
        promised = sum(blocks_for(share.num_tokens + 1, size) + share.num_sequences - 1 for share in unseen)
        busy = (load.running + load.waiting if load else 0) + sum(share.num_sequences for share in unseen)
        free = (load.blocks.free + load.blocks.cached if load else 0) - promised
        return DecodeView(
            worker_id=self.description.worker_id,
            address=self.description.address,
            sequences=max(busy, len(self._assigned)),
            max_sequences=self.description.max_sequences,
            free_blocks=max(0, free),
            total_blocks=self.description.num_blocks,
            block_size=size,
            usable=self.takes_requests(silent),
            last_assigned=self.last_assigned,
            cached_blocks=min(load.blocks.cached, max(0, free)) if load else 0,
            queued_tokens=(load.queued_tokens if load else 0) + sum(share.to_compute for share in unseen),
            step_tokens=self.description.step_tokens,
        )

    def takes_requests(self, out_of_reach: bool) -> bool:
        """By its last load, and what is known beside it: it is silent, or about to go."""
        load = self.load
        return load is not None and not (out_of_reach or load.draining or load.unwell)

    def _reported_queue(self) -> int:
        """Tokens that wait on a prefill worker, by its last report. A prompt that has not been looked for in its cache
        counts there with all its tokens, so that of what came from here no more is believed than was found uncached."""
        reported = self.load.queued_tokens if self.load else 0
        seen = [a.share for a in self._assigned.values() if a.loads_left == 0]
        from_others = max(0, reported - sum(share.num_tokens for share in seen))
        return from_others + min(reported, sum(share.to_compute for share in seen))

    def _unseen(self) -> list[Share]:
        return [a.share for a in self._assigned.values() if a.loads_left != 0]
