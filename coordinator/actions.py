"""Carries out what a request's lifecycle asks for: commands, tokens out, the queue, the end. Decides nothing."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Protocol

import structlog

from coordinator import events as ev
from coordinator.live import Live
from coordinator.records import finish_item
from coordinator.roster import Roster
from coordinator.steps_heard import StepsHeard
from coordinator.stream import ErrorItem, TokenItem
from coordinator.waiting import WaitingLine
from kvrelay.errors import Cancelled, Internal
from kvrelay.requests import RequestId
from kvrelay.session import Prefill

log = structlog.get_logger("coordinator.actions")

PUSHED_WAIT_S = 0.5
"""A short answer may be complete before prefill's figures of the hand-off are here; its end waits this long."""


class ActionsOwner(Protocol):
    """Whom the time that an action asked for, and room that it made, are told."""

    def feed_id(self, request_id: RequestId, event: ev.Event) -> None: ...

    def on_change(self) -> None: ...

    def fork(self, live: Live, action: ev.ForkOff, now: float) -> None: ...

    def failed(self, live: Live) -> None: ...


class Actions:
    """requests: the open ones, of which an ended one is taken out here."""

    def __init__(
        self,
        roster: Roster,
        queue: WaitingLine,
        requests: dict[RequestId, Live],
        counters: Counter[str],
        owner: ActionsOwner,
        steps: StepsHeard,
    ) -> None:
        self._roster = roster
        self._queue = queue
        self._requests = requests
        self._counters = counters
        self._owner = owner
        self._steps = steps

    def carry_out(self, live: Live, action: ev.Action, now: float) -> None:
        CARRY_OUT[type(action)](self, live, action, now)

    def _emit(self, live: Live, action: ev.Emit, now: float) -> None:
        live.journal.append(action.index, action.token_id, now, self._steps.current)
        offset_s, text = now - live.times.accepted_at, live.pending_text
        item = TokenItem(action.index, action.token_id, text, offset_s, live.sequence, live.pending_logprobs)
        live.too_slow = not live.stream.put(item)

    def _send(self, live: Live, action: ev.SendCommand, now: float) -> None:
        self._roster.send(action.worker, action.command)
        if type(action.command) is Prefill:
            self._roster.sent(action.worker, live.id)
            live.attempt.prefill_sent_at = now

    def _release(self, live: Live, action: ev.ReleasePlacement, now: float) -> None:
        for worker in (action.prefill, action.decode):
            if worker is not None:
                self._roster.release(worker, live.id)
        self._owner.on_change()

    def _requeue(self, live: Live, action: ev.Requeue, now: float) -> None:
        loss = action.loss
        if loss is None:
            self._counters["requeued"] += 1
        else:
            self._counters["migrated"] += 1
            self._counters[f"migrated.{loss.cause.value}"] += 1
            log.info("request moves", request=live.id, tokens=live.state.num_tokens, why=loss.words)
        live.anew(loss, now)
        live.not_before = action.not_before
        self._queue.add(live)
        asyncio.get_running_loop().call_at(action.not_before, self._owner.on_change)

    def _check_back(self, live: Live, action: ev.CheckBack, now: float) -> None:
        self._counters["checked_back"] += 1
        due = ev.CheckBackDue(action.attempt)
        asyncio.get_running_loop().call_at(action.at, self._owner.feed_id, live.id, due)

    def _finish(self, live: Live, action: ev.Finish, now: float) -> None:
        live.finish, live.outcome = action.reason, action.reason.value
        self._ended(live, now)
        if live.handed_over and live.attempt.pushed is None and not live.attempt.prefill_gone:
            asyncio.get_running_loop().call_later(PUSHED_WAIT_S, self.deliver, live)
        else:
            self.deliver(live)

    def deliver(self, live: Live) -> None:
        """The last message of a stream that ended well; once."""
        if self._requests.get(live.id) is not live or live.finish is None:
            return
        try:
            live.stream.put(finish_item(live, live.finish))
        except Exception:
            log.exception("finishing the text failed", request=live.id)
            live.stream.put(ErrorItem(Internal("detokenizing failed")))
        self._forget(live)

    def _fail(self, live: Live, action: ev.Fail, now: float) -> None:
        live.outcome = type(action.error).__name__
        if action.loss is not None:
            live.attempt.loss, live.attempt.lost_at = action.loss, now
            self._counters["attempts_used_up"] += 1
        self._ended(live, now)
        if live.too_slow:
            live.stream.cut_off(action.error)
        else:
            live.stream.put(ErrorItem(action.error))
        self._forget(live)
        if live.parent is not None and not isinstance(action.error, Cancelled):
            self._owner.failed(live)

    def _fork(self, live: Live, action: ev.ForkOff, now: float) -> None:
        if live.deadline is not None:
            live.deadline.cancel()
        self._forget(live)
        self._owner.fork(live, action, now)

    def _drop(self, live: Live, action: ev.Drop, now: float) -> None:
        self._counters[f"dropped.{action.what}"] += 1

    def _ended(self, live: Live, now: float) -> None:
        live.times.ended_at = now
        self._counters[f"outcome.{live.outcome}"] += 1
        self._counters["tokens"] += live.state.num_tokens
        self._queue.remove(live)
        if live.deadline is not None:
            live.deadline.cancel()

    def _forget(self, live: Live) -> None:
        self._requests.pop(live.id, None)


CARRY_OUT: dict[type, Callable[..., None]] = {
    ev.Emit: Actions._emit,
    ev.SendCommand: Actions._send,
    ev.Requeue: Actions._requeue,
    ev.CheckBack: Actions._check_back,
    ev.ReleasePlacement: Actions._release,
    ev.ForkOff: Actions._fork,
    ev.Finish: Actions._finish,
    ev.Fail: Actions._fail,
    ev.Drop: Actions._drop,
}
