"""Tiny workers that speak the session protocol over real gRPC and compute nothing: what a coordinator is tested with.

Each command that arrives is kept in `got`. What the worker answers is a test's to choose: `hold` names steps that wait
until they are let go: "reserve", "token0", "landed", "decode", "token N" (decode's, by index). Tokens are 97, 98, ...
by index, or those of `script`; sequence s of several has them s further on, or those of `scripts[s]`, also when it goes
on as a request of its own. Asked for log-probabilities it says those that `logprobs_of` makes up.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from kvrelay.blocks import BlockCounts, BlockTable, KVLayout, Ticket, blocks_for
from kvrelay.models.builtin import BUILTIN_EOS, builtin_identity
from kvrelay.requests import Incarnation, Logprobs, RequestId, Role, Sampling, WorkerId
from kvrelay.rpc.announce import announce
from kvrelay.rpc.channel import open_channel
from kvrelay.rpc.convert import CommandAssembler, report_to_protos
from kvrelay.rpc.server import RpcServer
from kvrelay.session import (
    Abort,
    Command,
    ComputeRecord,
    Ended,
    Heartbeat,
    Hello,
    Landed,
    Load,
    Prefill,
    Pushed,
    Refused,
    Report,
    Reserve,
    Reserved,
    Start,
    TokenOut,
    Work,
    WorkerDescription,
)
from kvrelay.v1 import worker_pb2, worker_pb2_grpc

LAYOUT = KVLayout(kv_heads=1, layers=1, block_size=16, head_dim=4, dtype="uint8")


class FakeWorker:
    """One worker of either role. Use `async with`; `announce_to` registers it with a coordinator."""

    def __init__(self, role: Role, name: str, life: str = "one", num_blocks: int = 64) -> None:
        self.role, self.name, self.life, self.num_blocks = role, name, life, num_blocks
        self.got: list[Command] = []
        self.script: list[int] | None = None
        self.scripts: dict[int, list[int]] = {}
        self.cached_tokens = 0
        self.refuse: Refused | None = None
        self.forever = False
        self.step_s = 0.0
        self.silent = False
        self.unwell = False
        self.hold: dict[str, asyncio.Event] = {}
        self.aborted: set[tuple[str, int, int | None]] = set()
        self.sessions: list[asyncio.Queue[Report | Exception | None]] = []
        self.known: dict[tuple[RequestId, int], Work] = {}
        self.tasks: set[asyncio.Task[Any]] = set()
        self.server = RpcServer()
        self.address = ""

    async def __aenter__(self) -> FakeWorker:
        service = _service(self)
        register = (
            worker_pb2_grpc.add_PrefillServiceServicer_to_server
            if self.role is Role.PREFILL
            else worker_pb2_grpc.add_DecodeServiceServicer_to_server
        )
        self.server.add(register, service, f"kvrelay.v1.{self.role.value.title()}Service")
        self.address = f"127.0.0.1:{self.server.bind('127.0.0.1:0')}"
        await self.server.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.die()

    async def die(self) -> None:
        for task in list(self.tasks):
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.server.stop(0)

    def describe(self, **changes: Any) -> WorkerDescription:
        values: dict[str, Any] = {
            "worker_id": WorkerId(self.name),
            "role": self.role,
            "incarnation": Incarnation(self.life),
            "pid": 1,
            "address": self.address,
            "model": builtin_identity("hash"),
            "layout": LAYOUT,
            "num_blocks": self.num_blocks,
            "transport": "grpc",
            "executor": "hash",
            "max_sequences": 256,
            "step_tokens": 512,
        }
        return WorkerDescription(**{**values, **changes})

    async def announce_to(self, coordinator: str, **changes: Any) -> None:
        async with open_channel(coordinator) as channel:
            await announce(channel, self.describe(**changes))

    def commands(self, kind: type) -> list[Any]:
        return [c for c in self.got if isinstance(c, kind)]

    def let_go(self, step: str) -> None:
        self.hold.pop(step).set()

    def load(self) -> Load:
        return Load(BlockCounts(total=self.num_blocks, free=self.num_blocks), counters=(), unwell=self.unwell)

    def say(self, report: Report) -> None:
        for session in self.sessions:
            session.put_nowait(report)

    def break_sessions(self) -> None:
        """The handler of every session raises, as a bug of a worker would make it."""
        for session in self.sessions:
            session.put_nowait(RuntimeError("ordered by a test"))

    def take(self, command: Command) -> None:
        self.got.append(command)
        if isinstance(command, Reserve):
            self._go(self._reserve(command))
        elif isinstance(command, Prefill):
            self._go(self._prefill(command))
        elif isinstance(command, Start):
            self._start(command)
        elif isinstance(command, Abort):
            self.aborted.add((command.request_id, command.attempt, command.sequence))

    def _go(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _gate(self, step: str) -> None:
        if step in self.hold:
            await self.hold[step].wait()

    async def _reserve(self, command: Reserve) -> None:
        await self._gate("reserve")
        work = command.work
        if self.refuse is not None:
            self.say(Report(refused=(_named(self.refuse, work),)))
            return
        self.known[work.request_id, work.attempt] = work
        if command.local_prefill:
            self.say(Report(reserved=(Reserved(work.request_id, work.attempt, None),), load=self.load()))
            await self._gate("token0")
            self._say_first(work)
            self._run(work, self._firsts(work))
            return
        size = len(work.token_ids) + 1
        table = BlockTable(0, 16, tuple(range(blocks_for(size, 16))), size)
        ticket = Ticket(Incarnation(self.life), len(self.known), table)
        self.say(Report(reserved=(Reserved(work.request_id, work.attempt, ticket),), load=self.load()))

    async def _prefill(self, command: Prefill) -> None:
        await self._gate("token0")
        work = command.work
        if self.refuse is not None:
            self.say(Report(refused=(_named(self.refuse, work),)))
            return
        rid, attempt = work.request_id, work.attempt
        if self._is_aborted(rid, attempt, 0):
            return
        self._say_first(work)
        if command.destination is None:
            self.say(Report(ended=(Ended(rid, attempt, 0, "length"),)))
            return
        await self._gate("landed")
        blocks = blocks_for(len(work.token_ids), 16)
        pushed = Pushed(rid, attempt, "grpc", blocks, blocks * LAYOUT.block_bytes, 1, 0.004, 0.001)
        self.say(Report(pushed=(pushed,), ended=(Ended(rid, attempt, 0, "length"),), load=self.load()))

    def _firsts(self, work: Work) -> tuple[int, ...]:
        first = len(work.token_ids) - work.num_prompt_tokens
        return tuple(self._token_at(first, sequence) for sequence in _sequences(work))

    def _say_first(self, work: Work) -> None:
        """The first token of each sequence, in one report with what computing the prompt took."""
        rid, attempt, first = work.request_id, work.attempt, len(work.token_ids) - work.num_prompt_tokens
        tokens = tuple(
            TokenOut(rid, attempt, s, first, token, logprobs_of(work.sampling, first, token))
            for s, token in enumerate(self._firsts(work))
        )
        record = ComputeRecord(rid, attempt, 0.001, 0.002, ((0.001, 0.002, 5),), self.cached_tokens)
        self.say(Report(tokens=tokens, records=(record,), load=self.load()))

    def _start(self, command: Start) -> None:
        self._run(self.known[command.request_id, command.attempt], command.first_tokens, landed=True)

    def _run(self, work: Work, firsts: tuple[int, ...], landed: bool = False) -> None:
        """One task per sequence that does not end with its first token."""
        index = len(work.token_ids) - work.num_prompt_tokens
        for at, (sequence, token) in enumerate(zip(_sequences(work), firsts, strict=True)):
            if work.stop.finish_of(index, token) is None:
                self._go(self._decode(work, at, sequence, landed and at == 0))

    async def _decode(self, work: Work, at: int, sequence: int, landed: bool) -> None:
        """at: the sequence's number in this attempt, 0 for one that moved; sequence: whose tokens it says."""
        await self._gate("decode")
        rid, attempt = work.request_id, work.attempt
        if landed:
            self.say(Report(landed=(Landed(rid, attempt),)))
        index = len(work.token_ids) - work.num_prompt_tokens + 1
        while not self._is_aborted(rid, attempt, at):
            await asyncio.sleep(self.step_s)
            await self._gate(f"token {index}")
            token = self._token_at(index, sequence)
            reason = work.stop.finish_of(index, token)
            ended = (Ended(rid, attempt, at, reason.value),) if reason else ()
            out = TokenOut(rid, attempt, at, index, token, logprobs_of(work.sampling, index, token))
            self.say(Report(tokens=(out,), ended=ended, load=self.load()))
            if reason and not self.forever:
                return
            index += 1

    def _is_aborted(self, rid: RequestId, attempt: int, sequence: int) -> bool:
        return not self.aborted.isdisjoint({(rid, attempt, None), (rid, attempt, sequence)})

    def _token_at(self, index: int, sequence: int) -> int:
        script = self.scripts.get(sequence, self.script)
        if script is None:
            return 97 + (index + sequence) % 26
        return script[index] if index < len(script) else BUILTIN_EOS


class OneRow(FakeWorker):
    """Takes one sequence, and as it is full then, one more ahead."""

    def describe(self, **changes: Any) -> WorkerDescription:
        return super().describe(**{"max_sequences": 1, **changes})


def logprobs_of(sampling: Sampling, index: int, token_id: int) -> Logprobs | None:
    """No two tokens of a request have the same ones."""
    if sampling.logprobs is None:
        return None
    return Logprobs(-index - token_id / 1024, tuple((t, -index - t / 1024) for t in range(sampling.logprobs)))


def _sequences(work: Work) -> range:
    """Those that go on from these tokens; a sequence that moved says in its name which it is."""
    _, dot, number = work.request_id.rpartition(".")
    return range(int(number), int(number) + 1) if dot else range(work.n)


def _named(refused: Refused, work: Work) -> Refused:
    return Refused(work.request_id, work.attempt, refused.code, refused.message, refused.field)


def _service(worker: FakeWorker) -> object:
    prefill = worker.role is Role.PREFILL
    response: Callable[..., Any] = (
        worker_pb2.PrefillServiceSessionResponse if prefill else worker_pb2.DecodeServiceSessionResponse
    )

    async def session(self: object, requests: AsyncIterator[Any], context: Any) -> None:
        assembler, reports = CommandAssembler(), asyncio.Queue[Report | Exception | None]()

        async def read() -> None:
            async for request in requests:
                command = assembler.feed(request.command)
                if isinstance(command, Hello):
                    worker.got.append(command)
                    reports.put_nowait(Report(welcome=worker.describe(), load=worker.load()))
                    worker.sessions.append(reports)
                elif isinstance(command, Heartbeat):
                    if not worker.silent:
                        reports.put_nowait(Report(load=worker.load(), heartbeat_seq=command.seq))
                elif command is not None:
                    worker.take(command)
            reports.put_nowait(None)

        reader = asyncio.ensure_future(read())
        try:
            while (report := await reports.get()) is not None:
                if isinstance(report, Exception):
                    raise report
                if worker.silent:
                    continue
                for proto in report_to_protos(report):
                    await context.write(response(report=proto))
        finally:
            reader.cancel()
            if reports in worker.sessions:  # before anything is waited for: gRPC may cancel a handler twice
                worker.sessions.remove(reports)
            await asyncio.gather(reader, return_exceptions=True)

    base = worker_pb2_grpc.PrefillServiceServicer if prefill else worker_pb2_grpc.DecodeServiceServicer
    return type("FakeService", (base,), {"Session": session, "Describe": None})()
