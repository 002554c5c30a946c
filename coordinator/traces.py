"""What is told of a request that has ended: times on our clock -> a RequestTrace. Knows no exporter.

Durations that a worker measured are laid where our own clock saw their beginning or their end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from coordinator.live import Attempt, Live
from kvrelay.telemetry.request_trace import AttemptTrace, Chunk, Interval, Late, RequestTrace


def trace_of(live: Live, model: str, now: float, late: Mapping[int, tuple[Late, ...]] | None = None) -> RequestTrace:
    """The record of a request at its end; also of one that was cut off (`now` is then its end).

    late: gaps of each sequence that are worth an event, by its number.
    """
    return RequestTrace(
        request_id=live.id,
        accepted_ns=live.times.accepted_ns,
        outcome=outcome_of(live),
        attempts=_forked(live, now, late or {}) if live.children else _attempts(live, now, (late or {}).get(0, ())),
        model=model,
        prompt_tokens=len(live.facts.prompt_ids),
        cached_tokens=live.cached_tokens,
        accepted_s=live.times.accepted_at,
    )


def outcome_of(live: Live) -> str:
    """Of n sequences that of the first one that failed, or of the first one. With a failure the others are cancelled:
    that is its consequence, and no cause."""
    outcomes = [one.outcome or "Cancelled" for one in live.children or (live,)]
    failed = [outcome for outcome in outcomes if outcome not in ("stop", "length")]
    return next((outcome for outcome in failed if outcome != "Cancelled"), failed[0] if failed else outcomes[0])


def _attempts(live: Live, now: float, late: tuple[Late, ...]) -> tuple[AttemptTrace, ...]:
    start = live.times.accepted_at
    ended = (live.times.ended_at or now) - start
    offsets = tuple(t - start for t in live.journal.times)
    tries = [*live.lost, live.attempt]
    return tuple(_attempt_trace(live, tries, i, offsets, ended, late) for i in range(len(tries)))


def _forked(prompt: Live, now: float, late: Mapping[int, tuple[Late, ...]]) -> tuple[AttemptTrace, ...]:
    """Up to the fork once, with the hand-off as the first sequence knows it that lived to hear of it."""
    last = len(prompt.lost)
    of_each = [_attempts(child, now, late.get(child.sequence, ())) for child in prompt.children]
    whole = next((attempts for attempts in of_each if attempts[last].push is not None), of_each[0])
    common = replace(whole[last], decode=None, lost_worker="", cause="", migrated_s=None)
    common = replace(common, token_offsets_s=(), step_ids=(), batch=(), sent_s=(), late=())
    own = []
    for child, attempts in zip(prompt.children, of_each, strict=True):
        first = replace(attempts[last], queue=None, place=None, reserve=None, prefill=None, chunks=(), push=None)
        own += [replace(attempt, sequence=child.sequence) for attempt in (first, *attempts[last + 1 :])]
    return (*whole[:last], common, *own)


def _attempt_trace(
    live: Live, tries: list[Attempt], i: int, offsets: tuple[float, ...], request_ended: float, late: tuple[Late, ...]
) -> AttemptTrace:
    """offsets: of all tokens of the request, request_ended: both in seconds from accept."""
    attempt, start = tries[i], live.times.accepted_at
    later = tries[i + 1] if i + 1 < len(tries) else None
    lost = _since(start, attempt.lost_at)
    ended = request_ended if lost is None else lost
    own = slice(attempt.first_index, later.first_index if later else None)
    tokens, steps = offsets[own], live.journal.steps[own]
    placed, routed, sent = (_since(start, at) for at in (attempt.placed_at, attempt.routed_at, attempt.prefill_sent_at))
    first = tokens[0] if tokens else ended
    pushed, landed, placement, loss = attempt.pushed, _since(start, attempt.landed_at), attempt.placement, attempt.loss
    decode = (placement.decode if placement else None) or ""
    alone = bool(decode) and placement is not None and placement.prefill is None
    computed = _since(start, attempt.reserved_at) if alone else sent
    on_decode = len(tokens) > 1 or (tokens and decode and (later is not None or live.handed_over))
    return AttemptTrace(
        ended_s=ended,
        number=attempt.number,
        first_index=attempt.first_index,
        token_offsets_s=tokens,
        prefill_worker=(placement.prefill if placement else None) or "",
        decode_worker=decode,
        lost_worker=loss.worker if loss else "",
        cause=loss.cause.value if loss else "",
        migrated_s=None if later is None else _migrated(later, start, offsets, request_ended),
        queue=Interval(attempt.queued_at - start, routed if routed is not None else ended),
        place=_between(routed, placed, ended),
        reserve=_between(placed, _since(start, attempt.reserved_at), ended) if decode else None,
        prefill=_between(computed, first, ended),
        chunks=_chunks(attempt, placed if alone else sent),
        push=Interval(landed - pushed.seconds, landed) if pushed and landed is not None else None,
        decode=Interval(first, ended) if on_decode else None,
        transport=pushed.transport if pushed else "",
        num_blocks=pushed.num_blocks if pushed else 0,
        num_bytes=pushed.num_bytes if pushed else 0,
        exposed_s=pushed.exposed_s if pushed else 0.0,
        step_ids=tuple([0 if step is None else step.step_id for step in steps]),
        batch=tuple([0 if step is None else step.batch for step in steps]),
        sent_s=_sent(live, own, tokens),
        incarnation=attempt.steps.description.incarnation if attempt.steps else "",
        late=tuple(each for each in late if attempt.first_index <= each.index < attempt.first_index + len(tokens)),
    )


def _sent(live: Live, own: slice, tokens: tuple[float, ...]) -> tuple[float, ...]:
    """Seconds from accept; tokens that were never written stand at their arrival."""
    start = live.times.accepted_at
    sent = [at - start for at in live.journal.sent[own]]
    for arrived in tokens[len(sent) :]:
        sent.append(max([arrived, *sent[-1:]]))
    return tuple(sent)


def _migrated(later: Attempt, start: float, offsets: tuple[float, ...], request_ended: float) -> float:
    """When the next attempt brought its first token, was lost itself, or the request ended."""
    ended = request_ended if later.lost_at is None else later.lost_at - start
    return min([ended, *offsets[later.first_index : later.first_index + 1]])


def _since(start: float, at: float | None) -> float | None:
    return None if at is None else at - start


def _between(start: float | None, end: float | None, ended: float) -> Interval | None:
    """None when it never began; up to the attempt's end when it did not end before."""
    return None if start is None else Interval(start, ended if end is None else end)


def _chunks(attempt: Attempt, sent: float | None) -> tuple[Chunk, ...]:
    """sent: when the command that the worker counts from was."""
    record = attempt.prefill_record
    if record is None or sent is None:
        return ()
    return tuple(Chunk(sent + offset, sent + offset + seconds, n) for offset, seconds, n in record.chunks)
