"""What a request's own figures are made of: records of workers in, the last message's figures out. Knows no roster."""

from __future__ import annotations

from coordinator.live import Live
from coordinator.stream import FinishItem
from kvrelay.requests import FinishReason, WorkerId
from kvrelay.session import ComputeRecord, Pushed


def keep_pushed(live: Live, worker: WorkerId, pushed: Pushed) -> None:
    """Keeps what a hand-off cost, if it is that of the current attempt."""
    if _is_ours(live, worker, pushed.attempt):
        live.attempt.pushed = pushed


def keep_computed(live: Live, worker: WorkerId, record: ComputeRecord) -> None:
    """Keeps what prefill did, if it did it for the current attempt."""
    if _is_ours(live, worker, record.attempt):
        live.attempt.prefill_record = record


def finish_item(live: Live, reason: FinishReason) -> FinishItem:
    """The end of a good stream. Workers and hand-off are those of the attempt that ended it."""
    placement = live.state.placement
    return FinishItem(
        reason=reason,
        text=live.text.finish(),
        completion_tokens=live.state.num_tokens,
        cached_tokens=live.cached_tokens,
        offset_s=(live.times.ended_at or 0.0) - live.times.accepted_at,
        prefill_worker=(placement.prefill if placement else None) or "",
        decode_worker=((placement.decode if placement else None) or "") if live.decoded else "",
        pushed=live.attempt.pushed if live.handed_over else None,
        migrations=live.state.tries.lost,
    )


def _is_ours(live: Live, worker: WorkerId, attempt: int) -> bool:
    placement = live.state.placement
    return placement is not None and attempt == live.state.attempt and worker == placement.prefill
