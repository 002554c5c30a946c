"""Owns every open request: feeds events to its lifecycle and carries out the actions. Knows no protos and no sockets.

One event loop, no task per request: reports of workers, calls of handlers and timers come in as plain calls. The
router runs whenever something changed, once per turn of the loop. Cost per token is what counts here.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import structlog

from coordinator import events as ev
from coordinator.lifecycle import accepts, step
from coordinator.live import Live, Times
from coordinator.output import OutputText
from coordinator.roster import Roster
from coordinator.states import Phase, RequestFacts, State
from coordinator.stream import ErrorItem, FinishItem, StreamBuffer, TokenItem
from coordinator.waiting import WaitingLine
from kvrelay.config import CoordinatorConfig
from kvrelay.errors import DeadlineExceeded, Internal, KVRelayError, ResourceExhausted, Unavailable
from kvrelay.requests import FinishReason, RequestId, Role, WorkerId
from kvrelay.session import Prefill, Report, TokenOut

log = structlog.get_logger("coordinator.dispatch")

SWEEP_S = 0.5
NO_WORKER_GRACE_S = 2.0
"""How long queued requests wait for a role that has no worker any more."""
STUCK_READER_S = 30.0
"""A client that takes nothing for so long is cut off, however little waits for it."""
PUSHED_WAIT_S = 0.5
"""A short answer may be complete before prefill's figures of the hand-off are here; its end waits this long."""
RETRY_AFTER_S = 1.0


class Dispatcher:
    def __init__(self, config: CoordinatorConfig, roster: Roster) -> None:
        self._config = config
        self._roster = roster
        self._live: dict[RequestId, Live] = {}
        self._open: dict[RequestId, StreamBuffer] = {}
        self._queue = WaitingLine(config.local_prefill_below)
        self._serial = 0
        self._pump_scheduled = False
        self._without: dict[Role, float] = {}
        self.counters: Counter[str] = Counter()
        roster.owner = self

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    @property
    def num_open(self) -> int:
        return len(self._open)

    # calls of handlers

    def check_room(self, needs_decode: bool) -> None:
        """Raises at once what would keep a new request out: no worker, a full queue, too many streams."""
        for role in (Role.PREFILL, Role.DECODE) if needs_decode else (Role.PREFILL,):
            if not self._roster.has(role):
                raise Unavailable(f"no {role} worker has a session here", retry_after_s=RETRY_AFTER_S)
        if len(self._open) >= self._config.open_limit:
            limit = self._config.open_limit
            raise ResourceExhausted(f"{limit} requests are open; that is the limit", retry_after_s=RETRY_AFTER_S)
        if len(self._queue) >= self._config.queue_limit:
            limit = self._config.queue_limit
            raise ResourceExhausted(f"{limit} requests wait already; that is the limit", retry_after_s=RETRY_AFTER_S)

    def submit(self, facts: RequestFacts, text: OutputText, times: Times) -> Live:
        """Takes the request in. The caller reads its stream and calls `leave` once, whatever happens."""
        now = time.monotonic()
        if facts.deadline_at is not None and facts.deadline_at <= now:
            raise DeadlineExceeded("the deadline passed before the request was taken in")
        self._serial += 1
        live = Live(State(facts), self._serial, text, StreamBuffer(self._config.slow_reader_bytes), times)
        self.check_room(live.needs_decode)
        self._live[live.id] = live
        self._open[live.id] = live.stream
        if facts.deadline_at is not None:
            loop = asyncio.get_running_loop()
            live.deadline = loop.call_at(facts.deadline_at, self._feed, live, ev.DeadlinePassed())
        self.counters["started"] += 1
        self._queue.add(live)
        self._pump()
        return live

    def leave(self, request_id: RequestId) -> None:
        """The handler is done: the client has everything, or has gone. Idempotent."""
        self._open.pop(request_id, None)
        live = self._live.get(request_id)
        if live is not None:
            self._feed(live, ev.ClientGone())
            self._forget(live)

    def end_all(self, error: KVRelayError) -> None:
        """Ends every open stream with this error."""
        for live in list(self._live.values()):
            self._feed(live, ev.StreamFailed(error))

    # RosterOwner

    def on_report(self, worker: WorkerId, report: Report) -> None:
        for reserved in report.reserved:
            self._roster.answered(worker, reserved.request_id)
            self._feed_id(reserved.request_id, ev.ReservedBy(worker, reserved.attempt, reserved.ticket))
        for r in report.refused:
            event = ev.RefusedBy(worker, r.attempt, r.code, r.message, r.field, r.retry_after_s)
            self._feed_id(r.request_id, event)
        if report.tokens:
            now = time.monotonic()
            for token in report.tokens:
                self._token(worker, token, now)
        for landed in report.landed:
            self._feed_id(landed.request_id, ev.LandedAt(worker, landed.attempt))
        self._keep_records(worker, report)
        for e in report.ended:
            self._feed_id(e.request_id, ev.WorkerEnded(worker, e.attempt, e.reason, e.code, e.message))
        if report.load is not None and self._queue:
            self.on_change()

    def on_worker_lost(self, worker: WorkerId, why: str) -> None:
        for live in list(self._live.values()):
            placement = live.state.placement
            if placement is not None and placement.role_of(worker) is not None:
                before = live.state.phase
                self._feed(live, ev.WorkerLost(worker))
                if before is not Phase.ENDED and live.state.phase is Phase.ENDED:
                    live.lost_worker = worker

    def on_change(self) -> None:
        """Something may let the router place a request: look at the queue once in this turn of the loop."""
        if not self._pump_scheduled:
            self._pump_scheduled = True
            asyncio.get_running_loop().call_soon(self._pump)

    # life

    async def run(self) -> None:
        """Looks twice a second for what no event will tell: roles without workers, clients that read nothing."""
        while True:
            await asyncio.sleep(SWEEP_S)
            now = time.monotonic()
            self._sweep_queue(now)
            for stream in list(self._open.values()):
                if stream.stuck_s(now) > STUCK_READER_S:
                    stream.cut_off(ResourceExhausted(f"the client read nothing for {STUCK_READER_S:.0f} s"))

    def _sweep_queue(self, now: float) -> None:
        for role in Role:
            if self._roster.has(role):
                self._without.pop(role, None)
            elif now - self._without.setdefault(role, now) >= NO_WORKER_GRACE_S:
                error = Unavailable(f"no {role} worker is left", retry_after_s=RETRY_AFTER_S)
                for live in self._queue.lives():
                    if role is Role.PREFILL or live.needs_decode:
                        self._feed(live, ev.StreamFailed(error))

    # events in

    def _token(self, worker: WorkerId, token: TokenOut, now: float) -> None:
        """The hot path: once per token of every stream."""
        live = self._live.get(token.request_id)
        if live is None:
            self.counters["token_too_late"] += 1
            return
        event = ev.TokenArrived(worker, token.attempt, token.index, token.token_id)
        if token.sequence or not accepts(live.state, event):
            self.counters["dropped.TokenArrived"] += 1
            return
        try:
            live.pending_text, hit = live.text.push(token.token_id)
        except IndexError:
            self.counters["token_outside_vocabulary"] += 1
            self._feed(live, ev.StreamFailed(Internal(f"worker {worker} sent a token outside the vocabulary")))
        except Exception:
            log.exception("detokenizer failed", request=live.id)
            self._feed(live, ev.StreamFailed(Internal("detokenizing failed")))
        else:
            stop = ev.StopStringHit(worker, token.attempt, token.index, token.token_id)
            self._feed(live, stop if hit else event, now)

    def _keep_records(self, worker: WorkerId, report: Report) -> None:
        for pushed in report.pushed:
            live = self._live.get(pushed.request_id)
            if live is not None and pushed.attempt == live.state.attempt:
                live.pushed = pushed
                self._feed(live, ev.PushedBy(worker, pushed.attempt))
                if live.finish is not None:
                    self._deliver_finish(live)
        for record in report.records:
            live = self._live.get(record.request_id)
            placement = live.state.placement if live else None
            if live and placement and record.attempt == live.state.attempt and worker == placement.prefill:
                live.prefill_record = record

    def _feed_id(self, request_id: RequestId, event: ev.Event) -> None:
        live = self._live.get(request_id)
        if live is not None:
            self._feed(live, event)

    def _feed(self, live: Live, event: ev.Event, now: float | None = None) -> None:
        """One event into one request. A bug on the way ends that request and nothing else."""
        now = time.monotonic() if now is None else now
        try:
            self._step(live, event, now)
        except Exception:
            log.exception("request failed", request=live.id, cause=type(event).__name__)
            self.counters["bugs"] += 1
            live.state = replace(live.state, phase=Phase.ENDED)
            self._fail(live, ev.Fail(Internal("internal error; see the server's log")), now)

    def _step(self, live: Live, event: ev.Event, now: float) -> None:
        before = live.state.phase
        live.state, actions = step(live.state, event, now)
        kind = type(event)
        if kind is ev.ReservedBy and before is Phase.RESERVING:
            live.times.reserved_at = now
        elif kind is ev.LandedAt and live.state.landed:
            live.times.landed_at = now
        for action in actions:
            CARRY_OUT[type(action)](self, live, action, now)
        if live.too_slow and live.state.phase is not Phase.ENDED:
            self._step(live, ev.ReaderTooSlow(), now)

    # actions out

    def _emit(self, live: Live, action: ev.Emit, now: float) -> None:
        live.journal.append(action.index, action.token_id, now)
        item = TokenItem(action.index, action.token_id, live.pending_text, now - live.times.accepted_at)
        live.too_slow = not live.stream.put(item)

    def _send(self, live: Live, action: ev.SendCommand, now: float) -> None:
        self._roster.send(action.worker, action.command)
        if type(action.command) is Prefill:
            self._roster.sent(action.worker, live.id)
            live.times.prefill_sent_at = now

    def _release(self, live: Live, action: ev.ReleasePlacement, now: float) -> None:
        for worker in (action.prefill, action.decode):
            if worker is not None:
                self._roster.release(worker, live.id)
        self.on_change()

    def _requeue(self, live: Live, action: ev.Requeue, now: float) -> None:
        live.not_before = action.not_before
        self.counters["requeued"] += 1
        self._queue.add(live)
        asyncio.get_running_loop().call_at(action.not_before, self.on_change)

    def _finish(self, live: Live, action: ev.Finish, now: float) -> None:
        live.finish, live.outcome = action.reason, action.reason.value
        self._ended(live, now)
        if live.handed_over and live.pushed is None:
            asyncio.get_running_loop().call_later(PUSHED_WAIT_S, self._deliver_finish, live)
        else:
            self._deliver_finish(live)

    def _deliver_finish(self, live: Live) -> None:
        if self._live.get(live.id) is not live or live.finish is None:
            return
        try:
            live.stream.put(self._finish_item(live, live.finish))
        except Exception:
            log.exception("finishing the text failed", request=live.id)
            live.stream.put(ErrorItem(Internal("detokenizing failed")))
        self._forget(live)

    def _finish_item(self, live: Live, reason: FinishReason) -> FinishItem:
        placement = live.state.placement
        return FinishItem(
            reason=reason,
            text=live.text.finish(),
            completion_tokens=live.state.num_tokens,
            cached_tokens=live.cached_tokens,
            offset_s=(live.times.ended_at or 0.0) - live.times.accepted_at,
            prefill_worker=(placement.prefill if placement else None) or "",
            decode_worker=((placement.decode if placement else None) or "") if live.decoded else "",
            pushed=live.pushed if live.handed_over else None,
        )

    def _fail(self, live: Live, action: ev.Fail, now: float) -> None:
        live.outcome = type(action.error).__name__
        self._ended(live, now)
        if live.too_slow:
            live.stream.cut_off(action.error)
        else:
            live.stream.put(ErrorItem(action.error))
        self._forget(live)

    def _drop(self, live: Live, action: ev.Drop, now: float) -> None:
        self.counters[f"dropped.{action.what}"] += 1

    def _ended(self, live: Live, now: float) -> None:
        live.times.ended_at = now
        self.counters[f"outcome.{live.outcome}"] += 1
        self.counters["tokens"] += live.state.num_tokens
        self._queue.remove(live)
        if live.deadline is not None:
            live.deadline.cancel()

    def _forget(self, live: Live) -> None:
        self._live.pop(live.id, None)

    # the queue

    def _pump(self) -> None:
        """Places requests until nobody can be placed."""
        self._pump_scheduled = False
        while self._queue:
            now = time.monotonic()
            found = self._queue.take(self._roster.snapshot(), now)
            if found is None:
                return
            live, placement = found
            live.times.routed_at = now
            for worker in (placement.prefill, placement.decode):
                if worker is not None:
                    self._roster.assign(worker, live.id, live.num_known_tokens)
            live.times.placed_at = time.monotonic()
            self._feed(live, ev.Place(placement, live.journal.token_ids))


CARRY_OUT: dict[type, Callable[..., None]] = {
    ev.Emit: Dispatcher._emit,
    ev.SendCommand: Dispatcher._send,
    ev.Requeue: Dispatcher._requeue,
    ev.ReleasePlacement: Dispatcher._release,
    ev.Finish: Dispatcher._finish,
    ev.Fail: Dispatcher._fail,
    ev.Drop: Dispatcher._drop,
}
