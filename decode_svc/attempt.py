"""An attempt as a decode worker keeps it, and what the core is made of. Values only."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from engine.block_pool import BlockPool
from engine.prefix_cache import Entry
from engine.prefixes import Prefix
from engine.scheduler import Scheduler
from engine.sequence import turn_of
from kvrelay.blocks import KVLayout, Ticket
from kvrelay.requests import Incarnation, SequenceKey, SequenceSpec
from kvrelay.session import Work
from kvtransfer.receiver import ReceiverTable
from kvtransfer.store import BlockStore


@dataclass(slots=True)
class DecodeAttempt:
    """ticket None: still waiting for blocks, or computed here. block_ids: owned by us from landed until the scheduler
    takes them over. sequences: numbers of those that are not over. published: entry of the last full block, once
    landed. num_pinned: blocks that nobody but its ticket holds, until landed. arrival counts attempts up.
    """

    key: SequenceKey
    work: Work
    need: int
    arrival: int
    ticket: Ticket | None = None
    landed: bool = False
    running: bool = False
    block_ids: tuple[int, ...] = ()
    first_tokens: tuple[int, ...] = ()
    prefix: Prefix | None = None
    published: Entry | None = None
    num_pinned: int = 0
    sequences: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.sequences.update(range(self.work.n))

    def key_of(self, sequence: int) -> SequenceKey:
        return replace(self.key, sequence=sequence)

    def goes_before(self, other: DecodeAttempt) -> bool:
        """As the engine has it for sequences that wait: while few have gone before the other one."""
        mine, others = self.work.priority, other.work.priority
        return mine > others and turn_of(self.arrival, mine) < turn_of(other.arrival, others)

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


def spec_of(key: SequenceKey, work: Work, first_token: int | None = None) -> SequenceSpec:
    """One sequence that goes on behind its first token; without one all n of them, with the prompt to be computed."""
    return SequenceSpec(
        key=key,
        token_ids=work.token_ids if first_token is None else (*work.token_ids, first_token),
        num_prompt_tokens=work.num_prompt_tokens,
        sampling=work.sampling.of_sequence(key.sequence),
        stop=work.stop,
        tenant=work.tenant,
        cache_salt=work.cache_salt,
        n=work.n if first_token is None else 1,
        prefix_cache=work.prefix_cache,
        priority=work.priority,
    )
