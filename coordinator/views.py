"""What the router may know: of the workers, of a request, and of who caches what. Values; nothing is decided here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvrelay.blocks import BlockKey
from kvrelay.requests import Priority, WorkerId


@dataclass(frozen=True, slots=True)
class PrefillView:
    """queued_tokens: reported and not yet computed, plus what was assigned and is not in a report yet.

    ticketed_tokens: the part of it that came from this coordinator. total_blocks: of the pool, 0 if unknown.
    filled: share of the pool that holds anything, in use or cached, 0 .. 1. leaving: nobody waits for it, as it takes
    nothing any more, or has been unwell for long.
    """

    worker_id: WorkerId
    queued_tokens: int = 0
    ticketed_tokens: int = 0
    step_tokens: int = 512
    usable: bool = True
    last_assigned: int = 0
    total_blocks: int = 0
    block_size: int = 16
    filled: float = 0.0
    leaving: bool = False


@dataclass(frozen=True, slots=True)
class DecodeView:
    """sequences, free_blocks and queued_tokens count what was assigned and is not in a report yet.

    free_blocks: with those that are only cached, cached_blocks. total: blocks of the pool. queued_tokens: known and not
    yet computed, of prompts that it computes itself as well.
    """

    worker_id: WorkerId
    address: str
    sequences: int = 0
    max_sequences: int = 256
    free_blocks: int = 0
    total_blocks: int = 0
    block_size: int = 16
    usable: bool = True
    last_assigned: int = 0
    cached_blocks: int = 0
    queued_tokens: int = 0
    step_tokens: int = 512

    @property
    def occupancy(self) -> float:
        """Share of the pool that is in use and cannot be had, 0 .. 1; what is only cached can."""
        return 1.0 - self.free_blocks / self.total_blocks if self.total_blocks else 0.0

    @property
    def filled(self) -> float:
        """Share of the pool that holds anything, in use or cached."""
        return min(1.0, self.occupancy + self.cached_blocks / self.total_blocks) if self.total_blocks else 0.0


class PrefixView(Protocol):
    def depths(self, keys: Sequence[BlockKey]) -> Mapping[WorkerId, int]:
        """How many of these blocks, from the first on, each worker caches; 0 may be left out."""
        ...


class NothingCached:
    """Where nobody caches anything."""

    def depths(self, keys: Sequence[BlockKey]) -> Mapping[WorkerId, int]:
        return {}


NOTHING_CACHED = NothingCached()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What the router may know of the workers. usable is false for those that drain or stall.

    serial: counts assignments up; what policies without a memory take turns by.
    """

    prefill: tuple[PrefillView, ...]
    decode: tuple[DecodeView, ...]
    index: PrefixView = NOTHING_CACHED
    serial: int = 0


@dataclass(frozen=True, slots=True)
class Want:
    """What the router needs to know of a request. needs_decode is false when the next token is all there is.

    num_tokens: known, and to be computed or found in a cache now; last_slots: token slots that the request fills if it
    goes on to its last token. keys: of the prompt's full blocks. num_sequences: that go on from these tokens.
    avoid: who may be to blame for the last loss; both workers of a hand-off that failed.
    """

    num_tokens: int
    needs_decode: bool = True
    blocked_since: float | None = None
    not_before: float = 0.0
    last_slots: int = 0
    avoid: tuple[WorkerId, ...] = ()
    keys: tuple[BlockKey, ...] = ()
    num_sequences: int = 1
    priority: Priority = Priority.NORMAL


@dataclass(frozen=True, slots=True)
class Share:
    """What a request brings to one worker: tokens whose KV it will hold, those of them it computes, and sequences."""

    num_tokens: int
    to_compute: int = 0
    num_sequences: int = 1
