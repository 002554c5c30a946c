"""What a request's own figures are made of: records of workers in, the last message's figures out. Knows no roster."""

from __future__ import annotations

from collections import Counter

from coordinator.live import Live
from coordinator.stream import FinishItem
from kvrelay.requests import FinishReason, WorkerId
from kvrelay.session import ComputeRecord, Pushed


def keep_pushed(live: Live, worker: WorkerId, pushed: Pushed) -> None:
    """Keeps what a hand-off cost, if it is that of the current attempt."""
    placement = live.state.placement
    if placement is not None and pushed.attempt == live.state.attempt and worker == placement.prefill:
        live.attempt.pushed = pushed


def keep_computed(live: Live, worker: WorkerId, record: ComputeRecord, counters: Counter[str]) -> None:
    """Keeps what the prompt took, if this worker computed it for the current attempt: prefill, or decode without it.

    Records are read before tokens, so what counts as cached is known when index 0 is, and no later attempt changes it.
    What a sequence that moved has to compute anew, its prompt and its tokens so far less what was cached, is counted;
    nothing is computed anew of what no worker had begun.
    """
    placement = live.state.placement
    if placement is None or record.attempt != live.state.attempt or worker != (placement.prefill or placement.decode):
        return
    live.attempt.prefill_record = record
    if live.attempt.first_index == 0:
        live.cached_tokens = min(record.num_cached_tokens, len(live.facts.prompt_ids))
    loss = live.lost[-1].loss if live.lost else None
    if loss is not None and any(attempt.has_begun for attempt in live.lost):
        again = max(0, len(live.facts.prompt_ids) + live.attempt.first_index - record.num_cached_tokens)
        counters["recomputed_tokens"] += again
        counters[f"recomputed_tokens.{loss.cause.value}"] += again


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
        num_cached_blocks=live.attempt.num_cached_blocks,
        sequence=live.sequence,
    )
