"""Owns every open request: what happens goes to its lifecycle as events. Knows no protos and no sockets.

One event loop, no task per request: reports of workers, calls of handlers and timers come in as plain calls. The
router runs whenever something changed (coordinator.placing). Cost per token is what counts here.

A request for n sequences is n requests from its first tokens on, in one stream; what workers say of their common
attempt is told to each of them.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager

import structlog

from coordinator import events as ev
from coordinator.actions import Actions
from coordinator.admission import Admission, Room
from coordinator.families import Families, first_token
from coordinator.lifecycle import accepts, step
from coordinator.live import Attempt, Live, Times
from coordinator.moves import end
from coordinator.output import OutputText
from coordinator.placing import Placing
from coordinator.records import keep_computed, keep_pushed
from coordinator.roster import Roster
from coordinator.router import Rules
from coordinator.states import Phase, RequestFacts, State, Tries
from coordinator.steps_heard import StepsHeard
from coordinator.stream import StreamBuffer
from coordinator.views import Share
from coordinator.waiting import WaitingLine
from kvrelay.config import CoordinatorConfig
from kvrelay.errors import DeadlineExceeded, Internal, KVRelayError, ResourceExhausted
from kvrelay.fault_points import fault_point
from kvrelay.requests import Logprobs, RequestId, Role, WorkerId
from kvrelay.session import Ended, Pushed, Report, Reserved, TokenOut

log = structlog.get_logger("coordinator.dispatch")

SWEEP_S = 0.5
STUCK_READER_S = 30.0
"""A client that takes nothing for so long is cut off, however little waits for it."""


class Dispatcher:
    def __init__(self, config: CoordinatorConfig, roster: Roster, steps: StepsHeard | None = None) -> None:
        self._config = config
        self.steps = steps or StepsHeard()
        self._roster = roster
        self._live: dict[RequestId, Live] = {}
        self._open: dict[RequestId, StreamBuffer] = {}
        self._families = Families(self._live)
        self._queue = WaitingLine(Rules(config.router, config.local_prefill_below))
        self._serial = 0
        self.counters: Counter[str] = Counter()
        self._admission = Admission(config, self.counters)
        self._placing = Placing(roster, self._queue, self._admission, self._feed)
        self._actions = Actions(roster, self._queue, self._live, self.counters, self, self.steps)
        roster.owner = self

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    @property
    def routes_by_keys(self) -> bool:
        """Whether the router looks at what a request's prompt begins with."""
        return self._config.router == "cache_aware" and self._roster.caches

    @property
    def num_open(self) -> int:
        return len(self._open)

    # calls of handlers

    @property
    def most_at_once(self) -> int:
        """Requests that can ever come in together."""
        return self._admission.most_at_once

    def room(self, count: int) -> AbstractContextManager[Room]:
        """Keeps room for so many requests while they are taken in; raises at once if there is not enough for all."""
        return self._admission.room(count, len(self._open), len(self._queue))

    def check_room(self, needs_decode: bool, room: Room | None = None) -> None:
        """Raises at once what would keep a new request out: no worker, a full queue, too many streams."""
        now = time.monotonic()
        self._placing.look(now)
        self._admission.check(needs_decode, len(self._open), len(self._queue), now, room)

    def refusal(self) -> ResourceExhausted | None:
        """The door of Generate: under overload nearly every call ends here, so nothing else is done for it."""
        return self._admission.full(len(self._open), len(self._queue))

    def submit(
        self,
        facts: RequestFacts,
        text: OutputText,
        times: Times,
        more_texts: tuple[OutputText, ...] = (),
        room: Room | None = None,
    ) -> Live:
        """Takes the request in. The caller reads its stream and calls `leave` once, whatever happens.

        more_texts: of the sequences after the first. Each sequence that ends well puts a FinishItem into the stream.
        room: that is kept for it.
        """
        now = time.monotonic()
        if facts.deadline_at is not None and facts.deadline_at <= now:
            raise DeadlineExceeded("the deadline passed before the request was taken in")
        state = State(facts, tries=Tries(self._config.max_attempts))
        stream = StreamBuffer(self._config.slow_reader_bytes)
        live = Live(state, self._serial, text, stream, times, Attempt(times.accepted_at), more_texts=more_texts)
        self._serial += facts.n
        self.check_room(live.needs_decode, room)
        if room is not None:
            self._admission.enter(room)
        self._live[live.id] = live
        self._open[live.id] = live.stream
        self._set_deadline(live)
        self.counters["started"] += 1
        self._placing.add(live)
        return live

    def leave(self, request_id: RequestId) -> None:
        """The handler is done: the client has everything, or has gone. Idempotent."""
        self._open.pop(request_id, None)
        for live in self._whole(request_id):
            self._feed(live, ev.ClientGone())
            self._live.pop(live.id, None)
        self._families.part(request_id)

    def end_all(self, error: KVRelayError) -> None:
        """Ends every open stream with this error, but for those that are over and wait for a figure."""
        for live in list(self._live.values()):
            self._feed(live, ev.StreamFailed(error))
            self._actions.deliver(live)

    # RosterOwner

    def on_report(self, worker: WorkerId, report: Report) -> None:
        if not self.steps.heard(worker, report):
            self.counters["steps_untold"] += 1
        for reserved in report.reserved:
            self._answered(worker, reserved)
            self.feed_id(reserved.request_id, ev.ReservedBy(worker, reserved.attempt, reserved.ticket))
        for r in report.refused:
            event = ev.RefusedBy(worker, r.attempt, r.code, r.message, r.field, r.retry_after_s)
            self._feed_all(r.request_id, event)
        for record in report.records:
            for live in self._lives(record.request_id, record.attempt):
                keep_computed(live, worker, record, self.counters)
        for landed in report.landed:  # before the tokens: on a slow line one report may bring it and the whole answer
            self._feed_all(landed.request_id, ev.LandedAt(worker, landed.attempt))
        if report.tokens:
            fault_point("coordinator.token")
            now = time.monotonic()
            steps = self.steps
            for step, tokens in steps.runs(worker, report.tokens):
                steps.current = step
                for token in tokens:
                    self._token(worker, token, now)
        for pushed in report.pushed:
            self._pushed(worker, pushed)
        for e in report.ended:
            self._ended(worker, e)
        if report.load is not None and self._queue:
            self.on_change()

    def on_worker_lost(self, worker: WorkerId, why: str) -> None:
        self.steps.lost(worker)
        self._placing.look(time.monotonic())
        for live in list(self._live.values()):
            placement = live.state.placement
            role = placement.role_of(worker) if placement is not None else None
            if role is Role.PREFILL:
                live.attempt.prefill_gone = True
            if role is not None and live.finish is None:
                self._feed(live, ev.WorkerLost(worker))
            elif role is Role.PREFILL:
                self._actions.deliver(live)

    def on_change(self) -> None:
        self._placing.on_change()

    # life

    async def run(self) -> None:
        """Looks twice a second for what no event will tell: roles without workers, clients that read nothing."""
        while True:
            await asyncio.sleep(SWEEP_S)
            fault_point("coordinator.sweep")
            now = time.monotonic()
            self._placing.sweep(now)
            for request_id, stream in list(self._open.items()):
                if stream.stuck_s(now) > STUCK_READER_S:
                    error = ResourceExhausted(f"the client read nothing for {STUCK_READER_S:.0f} s")
                    stream.cut_off(error)
                    for live in self._whole(request_id):
                        self._feed(live, ev.StreamFailed(error))

    # events in

    def _token(self, worker: WorkerId, token: TokenOut, now: float) -> None:
        """The hot path: once per token of every stream."""
        live = self._live.get(token.request_id)
        if live is None:
            live = self._families.child(token.request_id, token.attempt, token.sequence)
            if live is None:
                self.counters["token_too_late"] += 1
                return
        elif token.sequence or live.facts.n > 1:
            self._first_token(live, worker, token, now)
            return
        event = ev.TokenArrived(worker, token.attempt, token.index, token.token_id)
        self._take(live, event, token.logprobs, now)

    def _take(self, live: Live, event: ev.TokenArrived, logprobs: Logprobs | None, now: float) -> None:
        if not accepts(live.state, event):
            self.counters["dropped.TokenArrived"] += 1
            return
        try:
            live.pending_text, hit = live.text.push(event.token_id)
        except IndexError:
            self.counters["token_outside_vocabulary"] += 1
            self._feed(live, ev.StreamFailed(Internal(f"worker {event.worker} sent a token outside the vocabulary")))
        except Exception:
            log.exception("detokenizer failed", request=live.id)
            self._feed(live, ev.StreamFailed(Internal("detokenizing failed")))
        else:
            live.pending_logprobs = logprobs
            stop = ev.StopStringHit(event.worker, event.attempt, event.index, event.token_id)
            self._feed(live, stop if hit else event, now)

    def _first_token(self, live: Live, worker: WorkerId, token: TokenOut, now: float) -> None:
        """One of n first tokens; with the last of them the request forks."""
        if live.facts.n == 1:
            self.counters["dropped.TokenArrived"] += 1
            return
        event = first_token(live, worker, token)
        if event is not None:
            self._feed(live, event, now)

    def fork(self, prompt: Live, action: ev.ForkOff, now: float) -> None:
        """The sequences take the prompt's place, and each its first token."""
        firsts, prompt.attempt.first_tokens = prompt.attempt.first_tokens, {}
        children = self._families.found(prompt)
        self.counters["forked"] += len(children)
        for child in children:
            self._set_deadline(child)
            decode = child.state.decoder()
            if decode is not None:
                self._roster.assign(decode, child.id, Share(child.num_known_tokens))
                self._roster.answered(decode, child.id)
        for child, token_id in zip(children, action.token_ids, strict=True):
            event = ev.TokenArrived(action.worker, child.state.attempt, 0, token_id)
            self._take(child, event, firsts[child.sequence].logprobs, now)

    def failed(self, live: Live) -> None:
        """The stream of n sequences ends with this error: the others have nobody to compute for."""
        for one in live.parent.children if live.parent is not None else ():
            if one.state.phase is not Phase.ENDED:
                self._feed(one, ev.ClientGone())

    def _set_deadline(self, live: Live) -> None:
        if live.facts.deadline_at is not None:
            loop = asyncio.get_running_loop()
            live.deadline = loop.call_at(live.facts.deadline_at, self._feed, live, ev.DeadlinePassed())

    def _answered(self, worker: WorkerId, reserved: Reserved) -> None:
        """An answer to an older attempt says nothing of what the worker knows of this one."""
        live = self._live.get(reserved.request_id)
        if live is not None and live.state.attempt == reserved.attempt:
            self._roster.answered(worker, reserved.request_id)

    def _pushed(self, worker: WorkerId, pushed: Pushed) -> None:
        for live in self._lives(pushed.request_id, pushed.attempt):
            keep_pushed(live, worker, pushed)
            self._feed(live, ev.PushedBy(worker, pushed.attempt))
            if live.attempt.pushed is not None:
                self._actions.deliver(live)

    def _ended(self, worker: WorkerId, ended: Ended) -> None:
        """Decode ends each sequence, prefill its part for all of them."""
        event = ev.WorkerEnded(worker, ended.attempt, ended.reason, ended.code, ended.message)
        for live in self._lives(ended.request_id, ended.attempt):
            of_all = live.state.fork is None or live.state.prefiller() == worker
            if of_all or live.sequence == ended.sequence:
                self._feed(live, event)

    def _lives(self, request_id: RequestId, attempt: int) -> Sequence[Live]:
        """Whom a worker speaks of: the request of this id, or the sequences that it became in this attempt."""
        live = self._live.get(request_id)
        return (live,) if live is not None else self._families.under(request_id, attempt)

    def _whole(self, request_id: RequestId) -> Sequence[Live]:
        """All that is open of a client's request, whatever workers call it."""
        live = self._live.get(request_id)
        return (live,) if live is not None else self._families.of(request_id)

    def _feed_all(self, request_id: RequestId, event: ev.RefusedBy | ev.LandedAt) -> None:
        for live in self._lives(request_id, event.attempt):
            self._feed(live, event)

    def feed_id(self, request_id: RequestId, event: ev.Event) -> None:
        """One event into the request of this id; void when there is none any more."""
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
            live.state, actions = end(live.state, ev.Fail(Internal("internal error; see the server's log")))
            for action in actions:
                try:
                    self._actions.carry_out(live, action, now)
                except Exception:  # what comes after it, the client's last word above all, is said all the same
                    log.exception("request failed twice", request=live.id, cause=type(action).__name__)

    def _step(self, live: Live, event: ev.Event, now: float) -> None:
        before = live.state.phase
        live.state, actions = step(live.state, event, now)
        kind = type(event)
        if kind is ev.ReservedBy and live.state.phase is not before:
            live.attempt.reserved_at = now
            live.attempt.steps = self.steps.of(event.worker)  # type: ignore[union-attr]  # a ReservedBy
            ticket = event.ticket  # type: ignore[union-attr]  # a ReservedBy
            live.attempt.num_cached_blocks = ticket.num_cached_blocks if ticket is not None else 0
        elif kind is ev.LandedAt and live.state.landed and live.attempt.landed_at is None:
            live.attempt.landed_at = now
        for action in actions:
            self._actions.carry_out(live, action, now)
        if live.too_slow and live.state.phase is not Phase.ENDED:
            self._step(live, ev.ReaderTooSlow(), now)
