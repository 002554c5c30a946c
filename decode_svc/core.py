"""The decode life: KV in, tokens out. Runs on the engine thread; knows no sockets, protos or clocks.

The life of an attempt here:
1. Reserve: wait for blocks (FIFO), then a ticket: blocks RESERVED under a fresh epoch, answered Reserved.
2. The prefill worker opens the ticket over its link and writes; the receiver table says when all has landed.
3. Landed: the blocks become HELD. Start: the token that prefill sampled. With both, the sequence joins the batch with
   all but its last token computed.
4. Each step's tokens go up in one report; Finished ends the attempt.
Abort, deadline, a lost writer or the session's end stop it anywhere; the receiver table decides when memory comes back.
"""

from __future__ import annotations

from collections import Counter, deque

from decode_svc.attempt import DecodeAttempt, DecodeParts, spec_of
from decode_svc.grants import PoolRoom, next_grant
from engine.events import Finished, Preempted, Sampled
from engine.plan import Plan, Result
from kvrelay.blocks import BlockTable, Ticket, blocks_for
from kvrelay.requests import SequenceKey
from kvrelay.session import (
    Abort,
    Command,
    Drain,
    Ended,
    Landed,
    Load,
    Refused,
    Reserve,
    Reserved,
    Start,
    TokenOut,
)
from kvtransfer import actions as handoff
from kvtransfer.transports.base import NotificationArrived
from worker.attempts import Attempts, key_of
from worker.events import (
    Action,
    CommandReceived,
    Event,
    FromPrefill,
    LinkClosed,
    LinkOpened,
    SendReport,
    SessionClosed,
    SessionOpened,
    TransportHappened,
)
from worker.outbox import Outbox
from worker.refusals import refuse_work

MAX_WAITING_RESERVES = 1024


class DecodeCore:
    def __init__(self, parts: DecodeParts) -> None:
        self._p = parts
        self._outbox = Outbox()
        self._attempts: Attempts[DecodeAttempt] = Attempts()
        self._waiting: deque[DecodeAttempt] = deque()
        self._head_since: float | None = None
        self._actions: list[Action] = []
        self._counters: Counter[str] = Counter()
        self._epoch = 0
        self._step_id = 0
        self._draining = False

    # events

    def handle(self, event: Event, now: float) -> None:
        if isinstance(event, FromPrefill):
            self._carry_out(self._p.table.received(event.writer, event.message, now), now)
        elif isinstance(event, TransportHappened):
            if isinstance(event.event, NotificationArrived):
                self._carry_out(self._p.table.notification(event.event.peer, event.event.payload, now), now)
        elif isinstance(event, CommandReceived):
            self._command(event, now)
        elif isinstance(event, LinkOpened):
            self._carry_out(self._p.table.link_opened(event.peer, now), now)
        elif isinstance(event, LinkClosed):
            self._carry_out(self._p.table.link_closed(event.peer, event.by_kernel, now), now)
        elif isinstance(event, SessionOpened):
            self._outbox.open(event.session)
        elif isinstance(event, SessionClosed):
            for attempt in self._attempts.of_session(event.session):
                self._drop(attempt, now)
            self._outbox.close(event.session)

    def _command(self, event: CommandReceived, now: float) -> None:
        command: Command = event.command
        if isinstance(command, Reserve):
            self._reserve(event, command, now)
        elif isinstance(command, Start):
            attempt = self._attempts.get(key_of(event.session, command.request_id, command.attempt))
            if attempt is not None and not attempt.running:
                attempt.first_tokens = command.first_tokens
                self._run_if_ready(attempt)
        elif isinstance(command, Abort):
            key = key_of(event.session, command.request_id, command.attempt)
            attempt = self._attempts.get(key)
            if attempt is None:
                self._attempts.bury(key)
            else:
                self._drop(attempt, now)
        elif isinstance(command, Drain):
            self._draining = True

    # 1. reserve

    def _reserve(self, event: CommandReceived, command: Reserve, now: float) -> None:
        work = command.work
        key = key_of(event.session, work.request_id, work.attempt)
        if self._attempts.is_buried(key) or self._attempts.get(key) is not None:
            return
        refusal = refuse_work(work, self._p.max_context, self._p.vocab_size, self._draining)
        if refusal is None and command.local_prefill:
            refusal = Refused(work.request_id, work.attempt, "Unimplemented", "not built yet", field="local_prefill")
        if refusal is None and len(self._waiting) >= MAX_WAITING_RESERVES:
            refusal = Refused(
                work.request_id, work.attempt, "ResourceExhausted", "too many reserves wait", retry_after_s=1.0
            )
        need = blocks_for(len(work.token_ids) + 1, self._p.layout.block_size)
        if refusal is None and not self._p.scheduler.fits_alone(spec_of(key, work, ())):
            total = self._p.pool.num_blocks
            refusal = Refused(
                work.request_id, work.attempt, "InvalidArgument", f"does not fit {total} blocks", field="max_tokens"
            )
        if refusal is not None:
            self._outbox.add(event.session, refusal)
            return
        attempt = DecodeAttempt(key, work, need)
        self._attempts.add(attempt, now)
        self._waiting.append(attempt)

    def _grant(self, now: float) -> None:
        """Give blocks to waiting reserves while there is room."""
        while self._waiting:
            counts = self._p.pool.counts()
            room = PoolRoom(counts.total, self._p.scheduler.spare_blocks, counts.reserved + counts.quarantined)
            blocked_s = 0.0 if self._head_since is None else now - self._head_since
            i = next_grant([a.need for a in self._waiting], room, blocked_s)
            if i is None:
                self._head_since = now if self._head_since is None else self._head_since
                return
            if i == 0:
                self._head_since = None
            elif self._head_since is None:
                self._head_since = now
            attempt = self._waiting[i]
            del self._waiting[i]
            self._issue(attempt, now)
        self._head_since = None

    def _issue(self, attempt: DecodeAttempt, now: float) -> None:
        self._epoch += 1
        block_ids = self._p.pool.reserve(attempt.need, self._epoch)
        assert block_ids is not None, "a granted reserve found no blocks"
        table = BlockTable(self._p.layout.layer_group, self._p.layout.block_size, block_ids, attempt.num_tokens + 1)
        attempt.ticket = Ticket(self._p.incarnation, self._epoch, table)
        self._carry_out(self._p.table.reserve(attempt.ticket, attempt.num_tokens, attempt.key, now), now)
        self._outbox.add(attempt.key.session, Reserved(attempt.work.request_id, attempt.work.attempt, attempt.ticket))

    # 2. and 3. landed and started

    def _carry_out(self, actions: tuple[handoff.ReceiverAction, ...], now: float) -> None:
        for action in actions:
            if isinstance(action, handoff.WriteBytes):
                self._p.store.write(action.block_id, action.offset, action.data)
            elif isinstance(action, handoff.HoldBlocks):
                self._p.pool.hold_reserved(action.block_ids, action.epoch)
            elif isinstance(action, handoff.QuarantineBlocks):
                self._p.pool.quarantine(action.block_ids, action.epoch)
            elif isinstance(action, handoff.FreeBlocks):
                self._p.pool.free_reserved(action.block_ids, action.epoch)
            elif isinstance(action, handoff.DropPrefix):
                self._p.pool.release(action.block_ids)
            elif isinstance(action, handoff.LandedTicket):
                self._landed(action.key)
            elif isinstance(action, handoff.LostTicket):
                self._lost(action.key, action.reason, now)
            elif isinstance(action, handoff.Count):
                self._counters[action.name] += action.by
            else:
                self._actions.append(action)

    def _landed(self, key: SequenceKey) -> None:
        attempt = self._attempts.get(key)
        assert attempt is not None and attempt.ticket is not None, f"{key} landed and is not here"
        attempt.landed = True
        attempt.block_ids = attempt.ticket.table.block_ids
        self._outbox.add(key.session, Landed(attempt.work.request_id, attempt.work.attempt))
        self._run_if_ready(attempt)

    def _run_if_ready(self, attempt: DecodeAttempt) -> None:
        """Runnable when landed and started."""
        if not (attempt.landed and attempt.first_tokens):
            return
        attempt.running = True
        block_ids, attempt.block_ids = attempt.block_ids, ()
        spec = spec_of(attempt.key, attempt.work, attempt.first_tokens)
        self._p.scheduler.add(spec, block_ids=block_ids, num_computed=attempt.num_tokens)

    # 4. steps

    def schedule(self, now: float) -> Plan | None:
        self._grant(now)
        return self._p.scheduler.schedule()

    def apply(self, plan: Plan, result: Result, now: float) -> None:
        self._step_id = plan.step_id
        self._p.throughput.add(plan.num_samples, now)
        for event in self._p.scheduler.apply(plan, result):
            if isinstance(event, Sampled):
                key = event.key
                token = TokenOut(key.request_id, key.attempt, key.sequence, event.index, event.token_id)
                self._outbox.add(key.session, token)
            elif isinstance(event, Finished):
                key = event.key
                self._attempts.remove(key)
                self._outbox.add(key.session, Ended(key.request_id, key.attempt, key.sequence, event.reason.value))
            elif isinstance(event, Preempted):
                self._counters["preempted"] += 1

    # endings

    def _lost(self, key: SequenceKey, reason: str, now: float) -> None:
        attempt = self._attempts.remove(key)
        if attempt is not None:
            self._outbox.add(
                key.session, Ended(key.request_id, key.attempt, key.sequence, "failed", "Unavailable", reason)
            )

    def _drop(self, attempt: DecodeAttempt, now: float) -> None:
        """Forget an attempt. The table keeps its blocks until nobody can write to them any more."""
        self._attempts.remove(attempt.key)
        if attempt.ticket is None:
            self._waiting.remove(attempt)
        elif not attempt.landed:
            self._carry_out(self._p.table.abort(attempt.ticket.epoch, now), now)
        elif attempt.running:
            self._p.scheduler.abort(attempt.key)
        else:
            self._p.pool.release(attempt.block_ids)

    def actions(self, now: float) -> list[Action]:
        self._carry_out(self._p.table.tick(now), now)
        for attempt in self._attempts.expired(now):
            key = attempt.key
            self._drop(attempt, now)
            self._outbox.add(
                key.session,
                Ended(key.request_id, key.attempt, key.sequence, "failed", "DeadlineExceeded", "deadline passed"),
            )
        self._grant(now)
        reports = self._outbox.drain(self._step_id, now, self.load(now))
        actions, self._actions = self._actions, []
        return [*actions, *(SendReport(session, report) for session, report in reports)]

    def next_wake(self) -> float | None:
        timers = (self._p.table.next_deadline(), self._attempts.next_deadline())
        return min((t for t in timers if t is not None), default=None)

    def load(self, now: float) -> Load:
        return Load(
            blocks=self._p.pool.counts(),
            running=self._p.scheduler.num_running,
            waiting=len(self._waiting) + self._p.scheduler.num_waiting,
            queued_tokens=self._p.scheduler.queued_tokens,
            transfers_in_flight=self._p.table.in_flight,
            tokens_per_s=self._p.throughput.per_s(now),
            draining=self._draining,
            counters=tuple(sorted(self._counters.items())),
        )
