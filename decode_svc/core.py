"""The decode life: KV in, tokens out. Runs on the engine thread; knows no sockets, protos or clocks.

The life of an attempt here:
1. Reserve: wait for blocks (by class, then FIFO), then a ticket: blocks that are cached already are held, the others
   RESERVED under a fresh epoch, answered Reserved. Or, with local prefill, the prompt joins the batch here and nobody
   pushes.
2. The prefill worker opens the ticket over its link and writes; the receiver table says when all has landed.
3. Landed: the blocks become HELD, the full ones known by their keys. Start: the tokens that prefill sampled, one for
   each of n sequences. With both they join the batch with all but their last token computed, sharing the blocks.
4. Each step's tokens go up in one report; Finished ends a sequence, and the last one the attempt.
Abort, deadline, a lost writer or the session's end stop it anywhere; the receiver table decides when memory comes back.
A worker that drains gives back what waits for a ticket and prompts of which nothing is computed here yet, lets the rest
land and run, and gives that back at the end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from decode_svc.attempt import DecodeAttempt, DecodeParts, spec_of
from decode_svc.grants import MAX_PASSING_S, PoolRoom, next_grant
from decode_svc.running import Running
from engine.plan import Plan, Result
from engine.prefix_cache import Entry
from engine.queues import line_up
from kvrelay.blocks import BlockTable, Ticket, blocks_for
from kvrelay.fault_points import fault_point
from kvrelay.liveness import SteadyClock
from kvrelay.requests import SequenceKey
from kvrelay.session import (
    Landed,
    Load,
    Refused,
    Reserve,
    Reserved,
    Start,
)
from kvtransfer import actions as handoff
from kvtransfer.transports.base import NotificationArrived
from worker.attempts import key_of
from worker.desk import Desk
from worker.events import (
    Action,
    CommandReceived,
    Event,
    FromPrefill,
    LinkClosed,
    LinkOpened,
    TransportHappened,
)
from worker.refusals import refuse_work, refused
from worker.step_notes import StepTimes

MAX_WAITING_RESERVES = 1024
MATCHED_AHEAD = 4
"""So many of the waiting reserves are matched with the cache to see whether they fit."""


class DecodeCore:
    def __init__(self, parts: DecodeParts) -> None:
        self._p = parts
        self._desk: Desk[DecodeAttempt] = Desk(
            self._drop,
            self._kept,
            drop_sequence=self._drop_sequence,
            open_sequences=lambda attempt: sorted(attempt.sequences),
            cache=parts.pool.cache,
        )
        self._running = Running(parts, self._desk)
        self._waiting: deque[DecodeAttempt] = deque()
        self._head_since: float | None = None
        self._num_reserves = 0
        self._epoch = 0
        self._planned_nothing = False
        self._planned_at = 0.0
        self._steady = SteadyClock()
        """For the table: how long a writer is given to end proves nothing if it was our clock that leapt."""

    # events

    def handle(self, event: Event, now: float) -> None:
        table, seen = self._p.table, self._steady.at(now)
        if isinstance(event, FromPrefill):
            self._carry_out(table.received(event.writer, event.message, seen), now)
        elif isinstance(event, TransportHappened):
            if isinstance(event.event, NotificationArrived):
                self._carry_out(table.notification(event.event.peer, event.event.payload, seen), now)
        elif isinstance(event, LinkOpened):
            self._carry_out(table.link_opened(event.peer, seen), now)
        elif isinstance(event, LinkClosed):
            self._carry_out(table.link_closed(event.peer, event.by_kernel, seen), now)
        elif isinstance(event, CommandReceived) and isinstance(event.command, Reserve):
            self._reserve(event, event.command, now)
        elif isinstance(event, CommandReceived) and isinstance(event.command, Start):
            self._start(event, event.command, now)
        else:
            self._desk.handle(event, now)

    # 1. reserve

    def _reserve(self, event: CommandReceived, command: Reserve, now: float) -> None:
        work = command.work
        key = key_of(event.session, work.request_id, work.attempt)
        if not self._desk.is_news(key):
            return
        refusal = self._refusal(key, command)
        if refusal is not None:
            self._desk.tell(key, refusal)
            return
        need = blocks_for(len(work.token_ids) + 1, self._p.layout.block_size)
        self._num_reserves += 1
        attempt = DecodeAttempt(key, work, need, self._num_reserves)
        self._desk.attempts.add(attempt, now)
        if command.local_prefill:
            self._running.compute(attempt, now)
        else:
            late = self._head_since is not None and now - self._head_since >= MAX_PASSING_S
            if line_up(self._waiting, attempt, keep=int(late)) == 0:
                self._head_since = None

    def _refusal(self, key: SequenceKey, command: Reserve) -> Refused | None:
        work = command.work
        refusal = refuse_work(work, self._p.max_context, self._p.vocab_size, self._desk.draining)
        if refusal is not None:
            return refusal
        if len(self._waiting) + self._p.scheduler.num_waiting >= MAX_WAITING_RESERVES:
            return refused(work, "ResourceExhausted", "too many reserves wait", retry_after_s=1.0)
        if not self._p.scheduler.fits_alone(spec_of(key, work)):
            return refused(work, "InvalidArgument", f"does not fit {self._p.pool.num_blocks} blocks", "max_tokens")
        return None

    def _grant(self, now: float) -> None:
        """Give blocks to waiting reserves while there is room."""
        keep = self._p.scheduler.room
        while self._waiting:
            blocked_s = 0.0 if self._head_since is None else now - self._head_since
            keep.kept = self._waiting[0].need if blocked_s >= MAX_PASSING_S else 0
            counts = self._p.pool.counts()
            promised = counts.reserved + counts.quarantined + sum(a.num_pinned for a in self._desk.attempts)
            room = PoolRoom(counts.total, self._p.scheduler.spare_blocks, promised)
            i = next_grant(self._needs(room), room, blocked_s)
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
        self._head_since, keep.kept = None, 0

    def _needs(self, room: PoolRoom) -> Iterator[int]:
        """Blocks that each waiting reserve would take out of what is free. For the first ones that do not fit whole,
        what is cached and held by others anyway does not count."""
        for i, attempt in enumerate(self._waiting):
            if room.fits(attempt.need) or i >= MATCHED_AHEAD:
                yield attempt.need
            else:
                found = self._found(attempt)
                yield attempt.need - len(found) + self._p.pool.num_cached(found)

    def _found(self, attempt: DecodeAttempt) -> list[Entry]:
        prefixes = self._p.scheduler.prefixes
        if attempt.prefix is None:
            attempt.prefix = prefixes.of(spec_of(attempt.key, attempt.work))
        return [] if attempt.prefix is None else prefixes.find(attempt.prefix, attempt.work.token_ids)

    def _issue(self, attempt: DecodeAttempt, now: float) -> None:
        """What is cached is held before anything is reserved: a reserve may evict."""
        self._epoch += 1
        found = self._found(attempt)
        attempt.num_pinned = self._p.pool.num_cached(found)
        held = self._p.pool.hold(found)
        reserved = self._p.pool.reserve(attempt.need - len(held), self._epoch)
        assert reserved is not None, "a granted reserve found no blocks"
        if held:
            self._desk.counters["matched_tokens"] += len(held) * self._p.layout.block_size
        layout = self._p.layout
        table = BlockTable(layout.layer_group, layout.block_size, held + reserved, attempt.num_tokens + 1)
        attempt.ticket = Ticket(self._p.incarnation, self._epoch, table, len(held))
        self._carry_out(
            self._p.table.reserve(attempt.ticket, attempt.num_tokens, attempt.key, self._steady.at(now)), now
        )
        self._desk.tell(attempt.key, Reserved(attempt.work.request_id, attempt.work.attempt, attempt.ticket))
        fault_point("decode.reserved")

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
                self._landed(action.key, now)
            elif isinstance(action, handoff.LostTicket):
                self._desk.end(action.key, "failed", "Unavailable", action.reason)
            elif isinstance(action, handoff.Count):
                self._desk.count(action)
            else:
                self._desk.actions.append(action)

    def _landed(self, key: SequenceKey, now: float) -> None:
        fault_point("decode.landed")
        self._desk.moved(now)
        attempt = self._desk.attempts.get(key)
        assert attempt is not None and attempt.ticket is not None, f"{key} landed and is not here"
        attempt.landed = True
        attempt.block_ids = attempt.ticket.table.block_ids
        attempt.num_pinned = 0
        if attempt.prefix is not None:
            publish = self._p.scheduler.prefixes.publish_table
            attempt.published = publish(attempt.prefix, attempt.work.token_ids, attempt.block_ids)
        self._desk.tell(key, Landed(attempt.work.request_id, attempt.work.attempt))
        self._run_if_ready(attempt)

    def _start(self, event: CommandReceived, command: Start, now: float) -> None:
        """A sequence that its first token ends is over now: no Abort of it comes, and the blocks may never land."""
        attempt = self._desk.attempts.get(key_of(event.session, command.request_id, command.attempt))
        if attempt is None or attempt.running or attempt.first_tokens:
            return
        if len(command.first_tokens) != attempt.work.n:
            self._desk.counters["bad_start"] += 1
            return
        attempt.first_tokens = command.first_tokens
        stop, index = attempt.work.stop, attempt.work.first_index
        attempt.sequences -= {s for s, t in enumerate(command.first_tokens) if stop.finish_of(index, t) is not None}
        if attempt.sequences:
            self._run_if_ready(attempt)
        else:
            self._drop(attempt, now)

    def _run_if_ready(self, attempt: DecodeAttempt) -> None:
        """Runnable when landed and started."""
        if attempt.landed and attempt.first_tokens:
            fault_point("decode.started")
            self._running.start(attempt)

    # 4. steps

    def schedule(self, now: float) -> Plan | None:
        self._grant(now)
        plan = self._p.scheduler.schedule()
        self._planned_nothing, self._planned_at = plan is None, now
        return plan

    def apply(self, plan: Plan, result: Result, now: float) -> None:
        fault_point("decode.step")
        self._desk.moved(now)
        self._desk.step_id = plan.step_id
        self._desk.throughput.add(plan.num_samples, now)
        self._running.note_step(plan, self._planned_at, now)
        for event in self._p.scheduler.apply(plan, result):
            self._running.take(event, now)

    def stepped(self, plan: Plan, times: StepTimes) -> None:
        self._desk.steps.note(plan, times)

    # endings

    def _kept(self, attempt: DecodeAttempt, moving: bool) -> bool:
        return (attempt.ticket is not None or self._running.has_begun(attempt)) and not moving

    def _drop(self, attempt: DecodeAttempt, now: float) -> None:
        """Forget an attempt. The table keeps its blocks until nobody can write to them any more."""
        self._desk.attempts.remove(attempt.key)
        if attempt.running:
            self._running.drop(attempt)
        elif attempt.ticket is None:
            if self._waiting[0] is attempt:
                self._head_since = None
            self._waiting.remove(attempt)
        elif not attempt.landed:
            self._carry_out(self._p.table.abort(attempt.ticket.epoch, self._steady.at(now)), now)
        else:
            self._p.pool.release(attempt.block_ids)

    def _drop_sequence(self, attempt: DecodeAttempt, sequence: int, now: float) -> None:
        """The others go on. Before they run they are one: then only its number is remembered."""
        if attempt.sequences == {sequence}:
            self._drop(attempt, now)
        elif sequence in attempt.sequences:
            self._running.drop_sequence(attempt, sequence)

    def actions(self, now: float) -> list[Action]:
        self._carry_out(self._p.table.tick(self._steady.at(now)), now)
        self._desk.expire(now)
        self._grant(now)
        return self._desk.take_actions(self.load(now), now)

    def next_wake(self) -> float | None:
        due = self._p.table.next_deadline()
        timers = (None if due is None else self._steady.when(due), self._desk.next_due())
        return min((t for t in timers if t is not None), default=None)

    def load(self, now: float) -> Load:
        return self._desk.load(self._p.pool, self._p.scheduler, len(self._waiting), self._p.table.in_flight, now)

    def stuck_s(self, now: float) -> float:
        """What decode computes waits for nothing but blocks, and those that tickets hold have ends of their own."""
        counts = self._p.pool.counts()
        waits = self._planned_nothing and counts.reserved + counts.quarantined > 0
        return self._desk.stuck_s(self._p.scheduler.has_work and not waits, now)
