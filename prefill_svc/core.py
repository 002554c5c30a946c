"""The prefill life: prompt in, KV out, one token sampled. On the engine thread; knows no sockets, protos or clocks.

The life of an attempt here:
1. Prefill: the sequence joins the batch, which computes its prompt chunk by chunk; at the same time the ticket is
   opened over the link to its decode worker, which is dialled if need be.
2. After each chunk the newly full blocks, with the last chunk also the partial last one, become a part. A part holds a
   reference on its blocks until its write has ended, whatever becomes of the sequence.
3. The last chunk samples the next token; it goes up in the step's report.
4. Decode says landed: what the push cost goes up, and the attempt has ended.
Abort, deadline, a refused ticket, a failed write or the session's end stop it anywhere.
"""

from __future__ import annotations

from collections import Counter

from engine.events import Finished, Preempted, Sampled
from engine.plan import Plan, Result, SequenceSlice
from kvrelay.requests import SequenceSpec
from kvrelay.session import (
    Abort,
    ComputeRecord,
    Destination,
    Drain,
    Ended,
    Load,
    Prefill,
    Pushed,
    Refused,
    TokenOut,
    Work,
)
from kvtransfer import actions as handoff
from kvtransfer.transports.base import WriteDone, WriteFailed
from prefill_svc.attempt import PrefillAttempt, PrefillParts, spec_of
from prefill_svc.peers import Peers
from worker.attempts import Attempts, key_of
from worker.events import (
    Action,
    CommandReceived,
    Event,
    FromDecode,
    LinkClosed,
    LinkOpened,
    OpenLink,
    SendReport,
    SessionClosed,
    SessionOpened,
    TransportHappened,
)
from worker.outbox import Outbox
from worker.refusals import refuse_work

MAX_ATTEMPTS = 1024


class PrefillCore:
    def __init__(self, parts: PrefillParts) -> None:
        self._p = parts
        self._outbox = Outbox()
        self._attempts: Attempts[PrefillAttempt] = Attempts()
        self._actions: list[Action] = []
        self._counters: Counter[str] = Counter()
        self._step_id = 0
        self._planned_at = 0.0
        self._peers = Peers(parts.table.busy_with)
        self._draining = False

    # events

    def handle(self, event: Event, now: float) -> None:
        if isinstance(event, TransportHappened):
            if isinstance(event.event, WriteDone | WriteFailed):
                self._carry_out(self._p.table.transport_event(event.event, now), now)
        elif isinstance(event, FromDecode):
            self._carry_out(self._p.table.received(event.peer, event.message, now), now)
        elif isinstance(event, CommandReceived):
            self._command(event, now)
        elif isinstance(event, LinkOpened):
            self._peers.linked(event.peer)
            self._carry_out(self._p.table.link_opened(event.peer, now), now)
        elif isinstance(event, LinkClosed):
            self._carry_out(self._p.table.link_lost(event.peer, now), now)
            self._peers.lost(event.peer, now)
        elif isinstance(event, SessionOpened):
            self._outbox.open(event.session)
        elif isinstance(event, SessionClosed):
            for attempt in self._attempts.of_session(event.session):
                self._drop(attempt, now)
            self._outbox.close(event.session)

    def _command(self, event: CommandReceived, now: float) -> None:
        command = event.command
        if isinstance(command, Prefill):
            self._prefill(event, command, now)
        elif isinstance(command, Abort):
            key = key_of(event.session, command.request_id, command.attempt)
            attempt = self._attempts.get(key)
            if attempt is None:
                self._attempts.bury(key)
            else:
                self._drop(attempt, now)
        elif isinstance(command, Drain):
            self._draining = True

    # 1. take it in

    def _prefill(self, event: CommandReceived, command: Prefill, now: float) -> None:
        work, destination = command.work, command.destination
        key = key_of(event.session, work.request_id, work.attempt)
        if self._attempts.is_buried(key) or self._attempts.get(key) is not None:
            return
        spec = spec_of(key, work)
        refusal = refuse_work(work, self._p.max_context, self._p.vocab_size, self._draining)
        if refusal is None:
            refusal = self._refuse(work, spec, destination)
        if refusal is not None:
            self._outbox.add(event.session, refusal)
            return
        attempt = PrefillAttempt(key, work, destination, now)
        self._attempts.add(attempt, now)
        self._p.scheduler.add(spec)
        if destination is not None:
            ticket = destination.ticket
            attempt.num_pushed = ticket.num_cached_blocks
            target = OpenLink(ticket.incarnation, destination.worker_id, destination.address)
            self._actions.append(self._peers.want(target))
            self._carry_out(self._p.table.start(ticket, ticket.incarnation, key, attempt.num_tokens, now), now)

    def _refuse(self, work: Work, spec: SequenceSpec, destination: Destination | None) -> Refused | None:
        def refused(code: str, message: str, field: str) -> Refused:
            return Refused(work.request_id, work.attempt, code, message, field=field)

        if len(self._attempts) >= MAX_ATTEMPTS:
            return refused("ResourceExhausted", "too many prompts wait", "")
        if not self._p.scheduler.fits_alone(spec):
            return refused("InvalidArgument", f"does not fit {self._p.pool.num_blocks} blocks", "token_ids")
        if destination is not None:
            table = destination.ticket.table
            if table.block_size != self._p.layout.block_size:
                there, here = table.block_size, self._p.layout.block_size
                return refused("LayoutMismatch", f"block_size differs: {here} here, {there} there", "block_size")
            if table.num_tokens < len(work.token_ids):
                return refused("InvalidArgument", f"the ticket holds {table.num_tokens} tokens", "destination.ticket")
        return None

    # 2. and 3. compute and push

    def schedule(self, now: float) -> Plan | None:
        self._planned_at = now
        return self._p.scheduler.schedule(self._p.pace.budget)

    def apply(self, plan: Plan, result: Result, now: float) -> None:
        """Parts are made before the scheduler applies: a sequence that ends in this step releases its blocks there."""
        self._step_id = plan.step_id
        self._p.throughput.add(plan.num_tokens, now)
        self._p.pace.note(plan.num_tokens, now - self._planned_at)
        for rows in plan.slices:
            attempt = self._attempts.get(rows.key)
            if attempt is not None:
                self._note_chunk(attempt, rows, now)
                if attempt.destination is not None:
                    self._push(attempt, attempt.destination, rows, now)
        for event in self._p.scheduler.apply(plan, result):
            if isinstance(event, Sampled):
                self._sampled(event, now)
            elif isinstance(event, Finished):
                self._computed(event)
            elif isinstance(event, Preempted):
                self._counters["preempted"] += 1

    def _note_chunk(self, attempt: PrefillAttempt, rows: SequenceSlice, now: float) -> None:
        if attempt.started_at is None:
            attempt.started_at = self._planned_at
        chunk = (self._planned_at - attempt.received_at, now - self._planned_at, len(rows.token_ids))
        attempt.chunks.append(chunk)

    def _push(self, attempt: PrefillAttempt, destination: Destination, rows: SequenceSlice, now: float) -> None:
        """Make a part of the blocks that this chunk filled; the part owns one reference on each source until written.

        A sequence preempted here computes its chunks again: what was pushed before is not pushed twice.
        """
        last = rows.context_len == attempt.num_tokens
        full = rows.context_len // self._p.layout.block_size
        end = len(destination.ticket.expected_positions(attempt.num_tokens)) if last else full
        end += destination.ticket.num_cached_blocks if last else 0
        if end <= attempt.num_pushed:
            return
        positions = tuple(range(attempt.num_pushed, end))
        sources = rows.table.block_ids[attempt.num_pushed : end]
        attempt.num_pushed = end
        self._p.pool.retain(sources)
        ticket = destination.ticket
        self._carry_out(self._p.table.part_ready(ticket.incarnation, ticket.epoch, positions, sources, last, now), now)

    def _sampled(self, event: Sampled, now: float) -> None:
        attempt = self._attempts.get(event.key)
        if attempt is None:
            return
        attempt.token_at = now
        key = event.key
        self._outbox.add(key.session, TokenOut(key.request_id, key.attempt, key.sequence, event.index, event.token_id))

    def _computed(self, event: Finished) -> None:
        attempt = self._attempts.get(event.key)
        if attempt is None:
            return
        attempt.computed = True
        key = attempt.key
        started_at = attempt.started_at if attempt.started_at is not None else attempt.received_at
        token_at = attempt.token_at if attempt.token_at is not None else started_at
        self._outbox.add(
            key.session,
            ComputeRecord(
                key.request_id,
                key.attempt,
                queued_s=started_at - attempt.received_at,
                active_s=token_at - started_at,
                chunks=tuple(attempt.chunks),
            ),
        )
        if attempt.destination is None:
            self._end(attempt, event.reason.value)

    # 4. the hand-off's ending

    def _carry_out(self, actions: tuple[handoff.WriterAction, ...], now: float) -> None:
        for action in actions:
            if isinstance(action, handoff.Release):
                self._p.pool.release(action.source_ids)
            elif isinstance(action, handoff.Finished):
                self._pushed(action)
            elif isinstance(action, handoff.Failed):
                self._failed(action, now)
            elif isinstance(action, handoff.Count):
                self._counters[action.name] += action.by
            else:
                self._actions.append(action)

    def _pushed(self, action: handoff.Finished) -> None:
        attempt = self._attempts.get(action.key)
        if attempt is None:
            return
        stats, key = action.stats, action.key
        token_at = attempt.token_at if attempt.token_at is not None else stats.landed_at
        self._outbox.add(
            key.session,
            Pushed(
                key.request_id,
                key.attempt,
                transport=self._p.transport,
                num_blocks=stats.blocks,
                num_bytes=stats.bytes,
                num_parts=stats.parts,
                seconds=stats.write_s,
                exposed_s=max(0.0, stats.landed_at - token_at),
            ),
        )
        self._end(attempt, "length")

    def _failed(self, action: handoff.Failed, now: float) -> None:
        attempt = self._attempts.get(action.key)
        if attempt is not None:
            self._p.scheduler.abort(attempt.key)
            self._end(attempt, "failed", "Unavailable", action.reason)

    def _end(self, attempt: PrefillAttempt, reason: str, code: str = "", message: str = "") -> None:
        key = attempt.key
        self._attempts.remove(key)
        self._outbox.add(key.session, Ended(key.request_id, key.attempt, key.sequence, reason, code, message))

    def _drop(self, attempt: PrefillAttempt, now: float) -> None:
        """Forget an attempt. Parts already posted keep their references until their writes have ended."""
        self._attempts.remove(attempt.key)
        self._p.scheduler.abort(attempt.key)
        if attempt.destination is not None:
            ticket = attempt.destination.ticket
            self._carry_out(self._p.table.abort(ticket.incarnation, ticket.epoch, now), now)

    def actions(self, now: float) -> list[Action]:
        self._carry_out(self._p.table.tick(now), now)
        self._actions += self._peers.due(now)
        for attempt in self._attempts.expired(now):
            self._drop(attempt, now)
            key = attempt.key
            self._outbox.add(
                key.session,
                Ended(key.request_id, key.attempt, key.sequence, "failed", "DeadlineExceeded", "deadline passed"),
            )
        reports = self._outbox.drain(self._step_id, now, self.load(now))
        actions, self._actions = self._actions, []
        return [*actions, *(SendReport(session, report) for session, report in reports)]

    def next_wake(self) -> float | None:
        timers = (self._p.table.next_deadline(), self._attempts.next_deadline(), self._peers.next_due())
        return min((t for t in timers if t is not None), default=None)

    def load(self, now: float) -> Load:
        return Load(
            blocks=self._p.pool.counts(),
            running=self._p.scheduler.num_running,
            waiting=self._p.scheduler.num_waiting,
            queued_tokens=self._p.scheduler.queued_tokens,
            transfers_in_flight=self._p.table.in_flight,
            tokens_per_s=self._p.throughput.per_s(now),
            draining=self._draining,
            counters=tuple(sorted(self._counters.items())),
        )
