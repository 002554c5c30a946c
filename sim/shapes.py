"""What a simulated worker is like over all its lives, and the core that one life of it runs. Knows no network."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from decode_svc.attempt import DecodeParts
from decode_svc.core import DecodeCore
from decode_svc.main import RECOMPUTE_SHARE
from engine.budgets import Budgets
from engine.grammars import Grammars
from engine.hash_executor import HashExecutor
from engine.scheduler import Scheduler
from engine.swap_space import PreemptCosts
from kvrelay.guidance import byte_tokenizer
from kvrelay.link import LEASE_S
from kvrelay.models.builtin import BUILTIN_EOS, BUILTIN_VOCAB, builtin_identity
from kvrelay.requests import Incarnation, Role, WorkerId
from kvrelay.session import WorkerDescription
from kvtransfer.receiver import ReceiverTable
from kvtransfer.store import block_checksum
from kvtransfer.writer import WriterTable
from prefill_svc.attempt import PrefillParts
from prefill_svc.core import PrefillCore
from sim.memory import LedgerPool
from worker.pace import Pace

BLOCK_SIZE = 16


@dataclass(frozen=True)
class WorkerShape:
    """What does not change over the lives of a worker. Decode only: preempt, swap_slots (blocks that fit host memory),
    swap_s (what one of them is said to take)."""

    role: Role
    name: str
    coordinators: tuple[str, ...]
    transport: str
    num_blocks: int
    step_tokens: int
    max_sequences: int
    step_s: float
    verify_kv: bool = False
    lease_s: float = LEASE_S
    prefix_cache: bool = True
    preempt: str = "auto"
    swap_slots: int = 0
    swap_s: float = 0.001

    @property
    def address(self) -> str:
        return f"{self.name}:1"


def executor_of(shape: WorkerShape) -> HashExecutor:
    return HashExecutor(
        shape.num_blocks, BLOCK_SIZE, BUILTIN_VOCAB, BUILTIN_EOS, swap_blocks=shape.swap_slots, grammars=grammars()
    )


def grammars() -> Grammars:
    """Of an engine of its own. Processor time does not pass: it would decide differently every time."""
    return Grammars(lambda: byte_tokenizer(BUILTIN_VOCAB, BUILTIN_EOS), BUILTIN_VOCAB, [BUILTIN_EOS], lambda: 0.0)


def core_of(
    shape: WorkerShape, incarnation: Incarnation, executor: HashExecutor, pool: LedgerPool
) -> PrefillCore | DecodeCore:
    """As the worker's main composes it."""
    layout, late = executor.layout, shape.transport == "grpc"
    checksum_of = partial(block_checksum, executor.pool) if shape.verify_kv else None
    max_context, scheduler = shape.num_blocks * BLOCK_SIZE, _scheduler(shape, pool)
    if shape.role is Role.PREFILL:
        writer = WriterTable(incarnation, layout.block_bytes, refuses_late=late, checksum_of=checksum_of)
        pace = Pace(0.4, shape.step_tokens)
        return PrefillCore(
            PrefillParts(layout, max_context, BUILTIN_VOCAB, shape.transport, pool, scheduler, writer, pace)
        )
    receiver = ReceiverTable(
        incarnation,
        layout.block_bytes,
        refuses_late=late,
        bytes_over_link=late,
        lease_s=shape.lease_s,
        checksum_of=checksum_of,
    )
    return DecodeCore(
        DecodeParts(incarnation, layout, max_context, BUILTIN_VOCAB, pool, scheduler, receiver, executor.pool)
    )


def _scheduler(shape: WorkerShape, pool: LedgerPool) -> Scheduler:
    fingerprint = builtin_identity("hash").fingerprint
    budgets = Budgets(max_tokens=shape.step_tokens, max_sequences=shape.max_sequences)
    if shape.role is Role.PREFILL:
        return Scheduler(pool, BLOCK_SIZE, budgets, fingerprint=fingerprint)
    most = max(1, shape.step_tokens // RECOMPUTE_SHARE)
    budgets = Budgets(budgets.max_tokens, budgets.max_sequences, max_prefill_tokens=most)
    scheduler = Scheduler(pool, BLOCK_SIZE, budgets, fingerprint=fingerprint, swap_slots=shape.swap_slots)
    scheduler.room.costs = PreemptCosts(shape.preempt, swap_s=shape.swap_s)
    return scheduler


def describe(shape: WorkerShape, incarnation: Incarnation, executor: HashExecutor) -> WorkerDescription:
    return WorkerDescription(
        worker_id=WorkerId(shape.name),
        role=shape.role,
        incarnation=incarnation,
        pid=1,
        address=shape.address,
        model=builtin_identity("hash"),
        layout=executor.layout,
        num_blocks=shape.num_blocks,
        transport=shape.transport,
        executor="hash",
        max_sequences=shape.max_sequences,
        step_tokens=shape.step_tokens,
        verify_kv=shape.verify_kv,
        prefix_cache=shape.prefix_cache,
    )
