"""One prefill and one decode core, hand-driven in one thread: every message is a value in a list, time is a number.

Transports are modelled: `nixl` copies a part's blocks into the peer's pool when posted and brings its manifest later,
`grpc` sends the bytes over the link. Deliveries may be reordered between channels with a seeded `random.Random`.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from support.pair_requests import SESSION, VOCAB, Request

from decode_svc.attempt import DecodeParts
from decode_svc.core import DecodeCore
from engine.block_pool import BlockPool
from engine.budgets import Budgets
from engine.hash_executor import HashExecutor
from engine.sampler import Masks
from engine.scheduler import Scheduler
from kvrelay.link import BlockData, PartManifest
from kvrelay.requests import Incarnation, RequestId, WorkerId
from kvrelay.session import Abort, Destination, Prefill, Reserve, Start, TokenOut, Work
from kvtransfer.actions import ExitProcess, Post, Reply, Send
from kvtransfer.receiver import ReceiverTable
from kvtransfer.store import block_checksum
from kvtransfer.transports.base import NotificationArrived, Part, WriteDone
from kvtransfer.writer import WriterTable
from prefill_svc.attempt import PrefillParts
from prefill_svc.core import PrefillCore
from worker.events import (
    CommandReceived,
    Event,
    FromDecode,
    FromPrefill,
    LinkClosed,
    LinkOpened,
    OpenLink,
    SendReport,
    SessionClosed,
    SessionOpened,
    TransportHappened,
)
from worker.pace import Pace

P, D = Incarnation("p" * 16), Incarnation("d" * 16)


class Pair:
    """`submit` requests, `run` until all have ended. `ended_early(token)` plays a coordinator's stop string."""

    def __init__(
        self,
        *,
        transport: str = "nixl",
        prefill_blocks: int = 256,
        decode_blocks: int = 256,
        step_tokens: int = 64,
        decode_rows: int = 256,
        seed: int | None = None,
        verify_kv: bool = False,
        cache: bool = True,
        grammars: Callable[[], Masks | None] = lambda: None,
    ) -> None:
        """grammars: makes those of one engine; what the other one keeps must be of no use to it."""
        self.transport = transport
        self.rng = random.Random(seed) if seed is not None else None
        self.now = 1000.0
        refuses_late = transport == "grpc"
        self.p_exec = HashExecutor(prefill_blocks, 16, VOCAB, grammars=grammars())
        self.d_exec = HashExecutor(decode_blocks, 16, VOCAB, grammars=grammars())
        self.p_pool, self.d_pool = BlockPool(prefill_blocks, cache=cache), BlockPool(decode_blocks, cache=cache)
        layout = self.p_exec.layout
        budgets = Budgets(max_tokens=step_tokens)
        self.writer = WriterTable(
            P,
            layout.block_bytes,
            refuses_late=refuses_late,
            checksum_of=partial(block_checksum, self.p_exec.pool) if verify_kv else None,
        )
        self.receiver = ReceiverTable(
            D,
            layout.block_bytes,
            refuses_late=refuses_late,
            bytes_over_link=refuses_late,
            checksum_of=partial(block_checksum, self.d_exec.pool) if verify_kv else None,
        )
        self.prefill = PrefillCore(
            PrefillParts(
                layout,
                100_000,
                VOCAB,
                transport,
                self.p_pool,
                Scheduler(self.p_pool, 16, budgets),
                self.writer,
                Pace(0.4, step_tokens),
            )
        )
        self.decode = DecodeCore(
            DecodeParts(
                D,
                layout,
                100_000,
                VOCAB,
                self.d_pool,
                Scheduler(self.d_pool, 16, replace(budgets, max_sequences=decode_rows)),
                self.receiver,
                self.d_exec.pool,
            )
        )
        self.requests: dict[RequestId, Request] = {}
        self.to_prefill: dict[str, deque[Event]] = {}
        self.to_decode: dict[str, deque[Event]] = {}
        self.link_up = False
        self.hold_notifications = False
        self.hold_links = False
        self.drop_parts: set[int] = set()
        self.damage: Callable[[bytes], bytes] = lambda data: data
        """What becomes of a block's bytes on their way."""
        self.decode_steps = 0
        self.parts: list[Part] = []
        """Every part posted, in order."""
        self._post(self.to_prefill, "session", SessionOpened(SESSION, "c"))
        self._post(self.to_decode, "session", SessionOpened(SESSION, "c"))

    def close(self) -> None:
        self.p_exec.close()
        self.d_exec.close()

    # what a coordinator does

    def submit(self, work: Work, *, local: bool = False) -> Request:
        """local: decode computes the prompt itself."""
        request = self.requests[work.request_id] = Request(work, local)
        if local:
            self._command(self.to_decode, Reserve(work, local_prefill=True))
        elif work.stop.max_tokens == 1:
            self._command(self.to_prefill, Prefill(work, None))
        else:
            self._command(self.to_decode, Reserve(work))
        return request

    def abort(self, name: str) -> None:
        request = self.requests[RequestId(name)]
        request.aborted = True
        for queues in (self.to_prefill, self.to_decode):
            self._command(queues, Abort(request.work.request_id, request.work.attempt))

    def abort_sequence(self, name: str, sequence: int) -> None:
        """One sequence is over, as the coordinator alone can tell: decode hears it."""
        request = self.requests[RequestId(name)]
        request.dropped.add(sequence)
        self._command(self.to_decode, Abort(request.work.request_id, request.work.attempt, sequence))

    def close_session(self) -> None:
        for queues in (self.to_prefill, self.to_decode):
            self._post(queues, "session", SessionClosed(SESSION))
        for request in self.requests.values():
            request.aborted = True

    def _command(self, queues: dict[str, deque[Event]], command: Prefill | Reserve | Start | Abort) -> None:
        self._post(queues, "session", CommandReceived(SESSION, command))

    def _report(self, action: SendReport) -> None:
        report = action.report
        for reserved in report.reserved:
            request = self.requests[reserved.request_id]
            request.ticket = reserved.ticket
            assert (reserved.ticket is None) == request.local
            if reserved.ticket is not None and not request.aborted:
                destination = Destination(WorkerId("d"), "somewhere", reserved.ticket)
                self._command(self.to_prefill, Prefill(request.work, destination))
        for refused in report.refused:
            self.requests[refused.request_id].refused = refused
        for record in report.records:
            self.requests[record.request_id].records.append(record)
        for token in report.tokens:
            self._token(self.requests[token.request_id], token)
        for landed in report.landed:
            self.requests[landed.request_id].landed = True
        for pushed in report.pushed:
            self.requests[pushed.request_id].pushed = pushed
        for ended in report.ended:
            self.requests[ended.request_id].end(ended)

    def _token(self, request: Request, token: TokenOut) -> None:
        """With the first token of each sequence decode is told to go on, unless none of them does."""
        if request.aborted or token.sequence in request.dropped:
            return
        request.token(token)
        if request.local or request.started or not all(request.said):
            return
        request.started, work = True, request.work
        if all(map(request.is_over, range(work.n))):
            self._command(self.to_decode, Abort(work.request_id, work.attempt))
        else:
            firsts = tuple(said[0] for said in request.said)
            self._command(self.to_decode, Start(work.request_id, work.attempt, firsts))

    # what a test looks at

    def positions(self) -> list[tuple[int, ...]]:
        """Logical blocks of every part posted, in order."""
        return [part.positions for part in self.parts]

    def counters(self, core: PrefillCore | DecodeCore) -> dict[str, int]:
        return dict(core.load(self.now).counters)

    # the world

    def _post(self, queues: dict[str, deque[Event]], channel: str, event: Event) -> None:
        queues.setdefault(channel, deque()).append(event)

    def _deliver(self, queues: dict[str, deque[Event]], core: PrefillCore | DecodeCore) -> None:
        """Everything waiting, in order within each channel; between channels in a random order if seeded."""
        while True:
            held = {"notifications"} if self.hold_notifications else set()
            held |= {"link"} if self.hold_links else set()
            ready = [name for name, queue in queues.items() if queue and name not in held]
            if not ready:
                return
            name = self.rng.choice(ready) if self.rng else ready[0]
            core.handle(queues[name].popleft(), self.now)

    def _act(self, core: PrefillCore | DecodeCore) -> None:
        for action in core.actions(self.now):
            if isinstance(action, SendReport):
                self._report(action)
            elif isinstance(action, Reply):
                self._post(self.to_prefill, "link", FromDecode(D, action.message))
            elif isinstance(action, Send):
                self._post(self.to_decode, "link", FromPrefill(P, action.message))
            elif isinstance(action, OpenLink):
                self._dial()
            elif isinstance(action, Post):
                self._write(action.part)
            assert not isinstance(action, ExitProcess), f"exit: {action}"

    def _dial(self) -> None:
        if not self.link_up:
            self.link_up = True
            self._post(self.to_prefill, "link", LinkOpened(D))
            self._post(self.to_decode, "link", LinkOpened(P))

    def lose_prefill(self) -> None:
        """The prefill process dies: its kernel closes the link."""
        self.link_up = False
        self.to_prefill.clear()
        self._post(self.to_decode, "link", LinkClosed(P, by_kernel=True))

    def _write(self, part: Part) -> None:
        if part.part in self.drop_parts:
            return
        self.parts.append(part)
        if self.transport == "nixl":
            for source, target in zip(part.source_ids, part.dest_ids, strict=True):
                self.d_exec.pool.write(target, 0, self.damage(bytes(self.p_exec.pool.read(source))))
            self._post(self.to_decode, "notifications", TransportHappened(NotificationArrived(P, part.manifest)))
        else:
            for position, source in zip(part.positions, part.source_ids, strict=True):
                data = self.damage(bytes(self.p_exec.pool.read(source)))
                message = BlockData(part.epoch, part.part, position, 0, data)
                self._post(self.to_decode, "link", FromPrefill(P, message))
            self._post(self.to_decode, "link", FromPrefill(P, PartManifest(part.manifest)))
        done = TransportHappened(WriteDone(part.peer, part.epoch, part.part, 0.001))
        self._post(self.to_prefill, "notifications", done)

    def turn(self) -> None:
        """One turn of each engine thread."""
        cores = [
            (self.prefill, self.p_exec, self.to_prefill, self.p_pool),
            (self.decode, self.d_exec, self.to_decode, self.d_pool),
        ]
        if self.rng:
            self.rng.shuffle(cores)
        for core, executor, queues, pool in cores:
            self._deliver(queues, core)
            plan = core.schedule(self.now)
            self._act(core)
            if plan is not None:
                self.decode_steps += core is self.decode
                core.apply(plan, executor.run(plan), self.now)
                self._act(core)
            pool.check_integrity()
        self.now += 0.01

    def run(self, turns: int = 2000) -> None:
        """Until every request that was not aborted has ended, and nothing is in flight."""
        for _ in range(turns):
            self.turn()
            if all(r.is_done for r in self.requests.values()) and self.is_quiet():
                return
        raise AssertionError(f"not done after {turns} turns: {self.requests} {self.prefill.load(self.now)}")

    def is_quiet(self) -> bool:
        """No attempt is kept either: they are bounded, and one that is forgotten would take its place for ever."""
        loads = (self.prefill.load(self.now), self.decode.load(self.now))
        if any(len(core._desk.attempts) for core in (self.prefill, self.decode)):
            return False
        return all(
            load.running == load.waiting == load.transfers_in_flight == 0
            and load.blocks.free + load.blocks.cached == load.blocks.total
            for load in loads
        )
