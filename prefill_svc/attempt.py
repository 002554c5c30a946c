"""An attempt as a prefill worker keeps it, and what the core is made of. Values only."""

from __future__ import annotations

from dataclasses import dataclass

from engine.block_pool import BlockPool
from engine.scheduler import Scheduler
from kvrelay.blocks import KVLayout
from kvrelay.requests import SequenceKey, SequenceSpec, StopRule
from kvrelay.session import Destination, Work
from kvtransfer.writer import WriterTable
from worker.compute_notes import ComputeNotes
from worker.pace import Pace


@dataclass(slots=True)
class PrefillAttempt:
    """num_pushed: logical blocks made into parts (or cached at decode) so far. pushed: decode has them all."""

    key: SequenceKey
    work: Work
    destination: Destination | None
    notes: ComputeNotes
    num_pushed: int = 0
    pushed: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.work.token_ids)


@dataclass(slots=True)
class PrefillParts:
    """What the core is made of; built once by prefill_svc.main."""

    layout: KVLayout
    max_context: int
    vocab_size: int
    transport: str
    pool: BlockPool
    scheduler: Scheduler
    table: WriterTable
    pace: Pace


def spec_of(key: SequenceKey, work: Work) -> SequenceSpec:
    """Sequences that end after one token each: what ends the request is the coordinator's to say.

    Stop tokens are named only where they must not be drawn: none of them ends anything here.
    """
    index = work.first_index
    return SequenceSpec(
        key=key,
        token_ids=work.token_ids,
        num_prompt_tokens=work.num_prompt_tokens,
        sampling=work.sampling,
        stop=StopRule(index + 1, work.stop.banned(index), work.stop.min_tokens),
        tenant=work.tenant,
        cache_salt=work.cache_salt,
        n=work.n,
        prefix_cache=work.prefix_cache,
        priority=work.priority,
    )
