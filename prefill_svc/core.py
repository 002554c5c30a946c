"""The prefill life: prompt in, KV out, one token sampled. On the engine thread; knows no sockets, protos or clocks.

The life of an attempt here:
1. Prefill: the sequence joins the batch, which computes its prompt chunk by chunk; at the same time the ticket is
   opened over the link to its decode worker, which is dialled if need be.
2. After each chunk the newly full blocks, with the last chunk also the partial last one, become a part. A part holds a
   reference on its blocks until its write has ended, whatever becomes of the sequence. Blocks found in the cache are
   pushed like computed ones, before the first chunk.
3. The last chunk samples the next token, one for each of n sequences; they go up in the step's report.
4. Decode says landed: what the push cost goes up, and the attempt has ended; or with its token, if decode had all
   blocks cached and says so before.
A draw that cannot be made ends it as the request's own fault, and what was pushed is decode's to drop.
Abort, deadline, a refused ticket, a failed write or the session's end stop it anywhere. A worker that drains gives back
prompts of which nothing is computed yet, and at the end of its grace those that are not done.
"""

from __future__ import annotations

from engine.events import Failed, Finished, Matched, Preempted, Sampled
from engine.plan import Plan, Result, SequenceSlice
from kvrelay.errors import InvalidArgument
from kvrelay.fault_points import fault_point
from kvrelay.requests import SequenceSpec
from kvrelay.session import (
    Destination,
    Load,
    Prefill,
    Pushed,
    Refused,
    Work,
)
from kvtransfer import actions as handoff
from kvtransfer.transports.base import WriteDone, WriteFailed
from prefill_svc.attempt import PrefillAttempt, PrefillParts, spec_of
from prefill_svc.peers import Peers
from worker.attempts import key_of, whole
from worker.compute_notes import ComputeNotes
from worker.desk import Desk
from worker.events import (
    Action,
    CommandReceived,
    Event,
    FromDecode,
    LinkClosed,
    LinkOpened,
    OpenLink,
    TransportHappened,
)
from worker.refusals import refuse_work, refused
from worker.step_notes import StepTimes

MAX_ATTEMPTS = 1024
MOST_A_PART = 8192
"""Blocks, so that its manifest is a message of ordinary size. Only what was cached can be more at once."""


class PrefillCore:
    def __init__(self, parts: PrefillParts) -> None:
        self._p = parts
        self._desk: Desk[PrefillAttempt] = Desk(
            self._drop, self._kept, drop_sequence=self._drop_sequence, cache=parts.pool.cache
        )
        self._peers = Peers(parts.table.busy_with)
        self._planned_at = 0.0
        self._stepped = False
        """A step has just ended: what came meanwhile, perhaps the end of a write, is not handled yet."""

    # events

    def handle(self, event: Event, now: float) -> None:
        table = self._p.table
        if isinstance(event, TransportHappened):
            if isinstance(event.event, WriteDone | WriteFailed):
                self._desk.moved(now)
                self._carry_out(table.transport_event(event.event, now))
        elif isinstance(event, FromDecode):
            self._carry_out(table.received(event.peer, event.message, now))
        elif isinstance(event, LinkOpened):
            self._peers.linked(event.peer)
            self._carry_out(table.link_opened(event.peer, now))
        elif isinstance(event, LinkClosed):
            self._carry_out(table.link_lost(event.peer, now, event.reason, event.peer_dead))
            self._peers.lost(event.peer, now)
        elif isinstance(event, CommandReceived) and isinstance(event.command, Prefill):
            self._prefill(event, event.command, now)
        else:
            self._desk.handle(event, now)

    # 1. take it in

    def _prefill(self, event: CommandReceived, command: Prefill, now: float) -> None:
        work, destination = command.work, command.destination
        key = key_of(event.session, work.request_id, work.attempt)
        if not self._desk.is_news(key):
            return
        spec = spec_of(key, work)
        refusal = self._refusal(work, spec, destination)
        if refusal is not None:
            self._desk.tell(key, refusal)
            return
        attempt = PrefillAttempt(key, work, destination, ComputeNotes(now))
        self._desk.attempts.add(attempt, now)
        self._p.scheduler.add(spec)
        fault_point("prefill.taken")
        if destination is not None:
            ticket = destination.ticket
            attempt.num_pushed = ticket.num_cached_blocks
            target = OpenLink(ticket.incarnation, destination.worker_id, destination.address)
            self._desk.actions.append(self._peers.want(target))
            self._carry_out(self._p.table.start(ticket, ticket.incarnation, key, attempt.num_tokens, now))

    def _refusal(self, work: Work, spec: SequenceSpec, destination: Destination | None) -> Refused | None:
        refusal = refuse_work(work, self._p.max_context, self._p.vocab_size, self._desk.draining)
        if refusal is not None:
            return refusal
        if len(self._desk.attempts) >= MAX_ATTEMPTS:
            return refused(work, "ResourceExhausted", "too many prompts wait", retry_after_s=1.0)
        if not self._p.scheduler.fits_alone(spec):
            return refused(work, "InvalidArgument", f"does not fit {self._p.pool.num_blocks} blocks", "token_ids")
        if destination is not None:
            ticket, here = destination.ticket, self._p.layout.block_size
            table = ticket.table
            if table.block_size != here:
                differs = f"block_size differs: {here} here, {table.block_size} there"
                return refused(work, "LayoutMismatch", differs, "block_size")
            if table.num_tokens < len(work.token_ids):
                return refused(work, "InvalidArgument", f"it holds {table.num_tokens} tokens", "destination.ticket")
            if self._p.table.state(ticket.incarnation, ticket.epoch) is not None:
                return refused(work, "InvalidArgument", "its ticket is in use", "destination.ticket")
        return None

    # 2. and 3. compute and push

    def schedule(self, now: float) -> Plan | None:
        """Nothing while a write might outlive its link: that is looked at between steps, and a step may last long."""
        self._planned_at, self._stepped = now, False
        if self._p.table.in_doubt:
            return None
        plan = self._p.scheduler.schedule(self._p.pace.budget)
        for rows in plan.slices if plan is not None else ():
            attempt = self._desk.attempts.get(rows.key)
            if attempt is not None and attempt.destination is not None:
                self._push(attempt, attempt.destination, rows, rows.start, now)
        return plan

    def apply(self, plan: Plan, result: Result, now: float) -> None:
        """Parts are made before the scheduler applies: a sequence that ends in this step releases its blocks there."""
        self._stepped = True
        self._desk.moved(now)
        self._desk.step_id = plan.step_id
        self._desk.throughput.add(plan.num_tokens, now)
        self._p.pace.note(plan.num_tokens, now - self._planned_at)
        for rows in plan.slices:
            attempt = self._desk.attempts.get(rows.key)
            if attempt is not None:
                fault_point("prefill.chunk")
                attempt.notes.chunk(self._planned_at, now, len(rows.token_ids))
                if attempt.destination is not None:
                    self._push(attempt, attempt.destination, rows, rows.context_len, now)
        for event in self._p.scheduler.apply(plan, result):
            if isinstance(event, Sampled):
                self._sampled(event, now)
            elif isinstance(event, Finished):
                self._computed(event)
            elif isinstance(event, Failed):
                self._cannot_go_on(event)
            elif isinstance(event, Preempted):
                self._desk.counters["preempted"] += 1
            elif isinstance(event, Matched):
                self._matched(event)

    def stepped(self, plan: Plan, times: StepTimes) -> None:
        self._desk.steps.note(plan, times)

    def _push(
        self, attempt: PrefillAttempt, destination: Destination, rows: SequenceSlice, num_computed: int, now: float
    ) -> None:
        """Make a part of the blocks that are full by now; the part owns one reference on each source until written.

        A sequence preempted here computes its chunks again: what was pushed before is not pushed twice.
        """
        last = num_computed == attempt.num_tokens
        full = num_computed // self._p.layout.block_size
        end = len(destination.ticket.expected_positions(attempt.num_tokens)) if last else full
        end += destination.ticket.num_cached_blocks if last else 0
        if end <= attempt.num_pushed:
            return
        fault_point("prefill.part")
        ticket = destination.ticket
        for start in range(attempt.num_pushed, end, MOST_A_PART):
            positions = tuple(range(start, min(start + MOST_A_PART, end)))
            sources = rows.table.block_ids[start : start + len(positions)]
            self._p.pool.retain(sources)
            is_last = last and start + len(positions) == end
            part = (ticket.incarnation, ticket.epoch, positions, sources, is_last)
            self._carry_out(self._p.table.part_ready(*part, now))
        attempt.num_pushed = end

    def _matched(self, event: Matched) -> None:
        attempt = self._desk.attempts.get(event.key)
        if attempt is not None and attempt.notes.matched(event.num_tokens):
            self._desk.counters["matched_tokens"] += event.num_tokens

    def _sampled(self, event: Sampled, now: float) -> None:
        attempt = self._desk.attempts.get(whole(event.key))
        if attempt is None:
            return
        fault_point("prefill.sampled")
        attempt.notes.token_at = now
        self._desk.token(event)

    def _computed(self, event: Finished) -> None:
        """Sequence 0 ends last; the others have no attempt of their own."""
        attempt = self._desk.attempts.get(event.key)
        if attempt is None:
            return
        self._desk.tell(attempt.key, attempt.notes.record(attempt.key))
        if attempt.destination is None or attempt.pushed:
            self._desk.end(attempt.key, event.reason.value)

    def _cannot_go_on(self, event: Failed) -> None:
        """All n are over with this step. The ticket is left to decode, where the coordinator ends the attempt: if we
        did, decode might be heard first, saying that its writer is lost, which is no fault of the request.
        """
        self._desk.end(event.key, "failed", InvalidArgument.__name__, event.message)

    # 4. the hand-off's ending

    def _carry_out(self, actions: tuple[handoff.WriterAction, ...]) -> None:
        for action in actions:
            if isinstance(action, handoff.Release):
                self._p.pool.release(action.source_ids)
            elif isinstance(action, handoff.Finished):
                self._pushed(action)
            elif isinstance(action, handoff.Failed):
                self._p.scheduler.abort(action.key)
                self._desk.end(action.key, "failed", "Unavailable", action.reason)
            elif isinstance(action, handoff.Count):
                self._desk.count(action)
            else:
                self._desk.actions.append(action)

    def _pushed(self, action: handoff.Finished) -> None:
        attempt = self._desk.attempts.get(action.key)
        if attempt is None:
            return
        fault_point("prefill.pushed")
        stats, key = action.stats, action.key
        token_at = attempt.notes.token_at if attempt.notes.token_at is not None else stats.landed_at
        self._desk.tell(
            key,
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
        attempt.pushed = True
        if attempt.notes.token_at is not None:
            self._desk.end(key, "length")

    @staticmethod
    def _kept(attempt: PrefillAttempt, moving: bool) -> bool:
        """One whose token is sampled is all but done: only its last blocks are on their way."""
        return attempt.notes.token_at is not None or (attempt.notes.started_at is not None and not moving)

    def _drop_sequence(self, attempt: PrefillAttempt, sequence: int, now: float) -> None:
        """Here all n are one: the prompt, and its blocks, are for the others too."""

    def _drop(self, attempt: PrefillAttempt, now: float) -> None:
        """Forget an attempt. Parts already posted keep their references until their writes have ended."""
        self._desk.attempts.remove(attempt.key)
        self._p.scheduler.abort(attempt.key)
        if attempt.destination is not None:
            ticket = attempt.destination.ticket
            self._carry_out(self._p.table.abort(ticket.incarnation, ticket.epoch, now))

    def actions(self, now: float) -> list[Action]:
        if not self._stepped:
            self._carry_out(self._p.table.tick(now))
        self._desk.actions += self._peers.due(now)
        self._desk.expire(now)
        return self._desk.take_actions(self.load(now), now)

    def next_wake(self) -> float | None:
        timers = (self._p.table.next_deadline(), self._desk.next_due(), self._peers.next_due())
        return min((t for t in timers if t is not None), default=None)

    def load(self, now: float) -> Load:
        return self._desk.load(self._p.pool, self._p.scheduler, 0, self._p.table.in_flight, now)

    def stuck_s(self, now: float) -> float:
        """Work that waits for blocks of writes which do not end counts too: their receivers, or we, are stuck."""
        return self._desk.stuck_s(self._p.scheduler.has_work, now)
