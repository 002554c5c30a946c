"""What is told of a request that has ended: times on our clock -> a RequestTrace. Knows no exporter.

Durations that a worker measured are laid where our own clock saw their beginning or their end.
"""

from __future__ import annotations

from coordinator.live import Live
from kvrelay.telemetry.request_trace import Chunk, Interval, RequestTrace


def trace_of(live: Live, model: str, now: float) -> RequestTrace:
    """The record of a request at its end; also of one that was cut off (`now` is then its end)."""
    times, placement = live.times, live.state.placement
    start = times.accepted_at
    ended = (times.ended_at or now) - start
    tokens = tuple(t - start for t in live.journal.times)
    placed, routed = _since(start, times.placed_at), _since(start, times.routed_at)
    reserved, sent = _since(start, times.reserved_at), _since(start, times.prefill_sent_at)
    first = tokens[0] if tokens else ended
    pushed, landed = live.pushed, _since(start, times.landed_at)
    return RequestTrace(
        request_id=live.id,
        accepted_ns=times.accepted_ns,
        ended_s=ended,
        outcome=live.outcome or "Cancelled",
        model=model,
        prompt_tokens=len(live.facts.prompt_ids),
        cached_tokens=live.cached_tokens,
        token_offsets_s=tokens,
        prefill_worker=(placement.prefill if placement else None) or "",
        decode_worker=(placement.decode if placement else None) or "",
        lost_worker=live.lost_worker,
        queue=Interval(0.0, routed if routed is not None else ended),
        place=_between(routed, placed, ended),
        reserve=_between(placed, reserved, ended) if placement and placement.decode else None,
        prefill=_between(sent, first, ended),
        chunks=_chunks(live, sent),
        push=Interval(landed - pushed.seconds, landed) if pushed and landed is not None else None,
        decode=Interval(first, ended) if len(tokens) > 1 or (tokens and live.handed_over) else None,
        transport=pushed.transport if pushed else "",
        num_blocks=pushed.num_blocks if pushed else 0,
        num_bytes=pushed.num_bytes if pushed else 0,
        exposed_s=pushed.exposed_s if pushed else 0.0,
    )


def _since(start: float, at: float | None) -> float | None:
    return None if at is None else at - start


def _between(start: float | None, end: float | None, ended: float) -> Interval | None:
    """None when it never began; up to the request's end when it did not end before."""
    return None if start is None else Interval(start, ended if end is None else end)


def _chunks(live: Live, sent: float | None) -> tuple[Chunk, ...]:
    record = live.prefill_record
    if record is None or sent is None:
        return ()
    return tuple(Chunk(sent + offset, sent + offset + seconds, n) for offset, seconds, n in record.chunks)
