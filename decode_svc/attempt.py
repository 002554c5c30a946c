"""An attempt as a decode worker keeps it, and what the core is made of. Values only."""

from __future__ import annotations

from dataclasses import dataclass

from engine.block_pool import BlockPool
from engine.scheduler import Scheduler
from kvrelay.blocks import KVLayout, Ticket
from kvrelay.requests import Incarnation, SequenceKey, SequenceSpec
from kvrelay.session import Work
from kvtransfer.receiver import ReceiverTable
from kvtransfer.store import BlockStore


@dataclass(slots=True)
class DecodeAttempt:
    """ticket None: still waiting for blocks. block_ids: owned by us from landed until the scheduler takes them over."""

    key: SequenceKey
    work: Work
    need: int
    ticket: Ticket | None = None
    landed: bool = False
    running: bool = False
    block_ids: tuple[int, ...] = ()
    first_tokens: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.work.token_ids)


@dataclass(slots=True)
class DecodeParts:
    """What the core is made of; built once by decode_svc.main."""

    incarnation: Incarnation
    layout: KVLayout
    max_context: int
    vocab_size: int
    pool: BlockPool
    scheduler: Scheduler
    table: ReceiverTable
    store: BlockStore


def spec_of(key: SequenceKey, work: Work, first_tokens: tuple[int, ...]) -> SequenceSpec:
    return SequenceSpec(
        key=key,
        token_ids=work.token_ids + first_tokens,
        num_prompt_tokens=work.num_prompt_tokens,
        sampling=work.sampling,
        stop=work.stop,
        tenant=work.tenant,
        cache_salt=work.cache_salt,
    )
