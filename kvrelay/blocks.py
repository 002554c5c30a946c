"""The shared block-table format and the shape of a block. Knows neither pools nor wires."""

from __future__ import annotations

import enum
import hashlib
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, fields

from kvrelay.errors import LayoutMismatch
from kvrelay.requests import Incarnation

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks needed to hold `num_tokens` token slots."""
    return -(-num_tokens // block_size)


@dataclass(frozen=True, slots=True)
class BlockTable:
    """Logical block -> block id, for one sequence and one layer group: the one format of the whole system.

    The same value stands in plans, tickets, manifests (a slice of it) and protos.
    num_tokens counts the token slots in use; the last block may be partly full.
    """

    layer_group: int
    block_size: int
    block_ids: tuple[int, ...]
    num_tokens: int

    def __post_init__(self) -> None:
        if self.num_tokens > len(self.block_ids) * self.block_size:  # once per sequence and step: no call for it
            raise ValueError(
                f"num_tokens {self.num_tokens} does not fit {len(self.block_ids)} blocks of {self.block_size}"
            )


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The shape of a block: [kv_heads, layers, 2, block_size, head_dim], heads outermost, one contiguous range.

    A pool is [num_blocks, *block]. Index 0 of the axis of length 2 is K, index 1 is V.
    Both ends of a link compare it field by field; pool size is not part of it.
    """

    kv_heads: int
    layers: int
    block_size: int
    head_dim: int
    dtype: str
    layer_group: int = 0
    shards: int = 1

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        return (self.kv_heads, self.layers, 2, self.block_size, self.head_dim)

    @property
    def block_bytes(self) -> int:
        return self.kv_heads * self.layers * 2 * self.block_size * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def token_bytes(self) -> int:
        return self.block_bytes // self.block_size

    def offset(self, block_id: int) -> int:
        """Byte offset of a block from the base of its pool (a Python int: never wraps)."""
        return block_id * self.block_bytes


def require_same(mine: object, theirs: object, what: str) -> None:
    """Compare two values of one dataclass; LayoutMismatch names the first field that differs and both values."""
    for field in fields(mine):  # type: ignore[arg-type]  # any frozen dataclass
        a, b = getattr(mine, field.name), getattr(theirs, field.name)
        if a != b:
            raise LayoutMismatch(f"{what} differs in {field.name}: {a!r} here, {b!r} there", field=field.name)


@dataclass(frozen=True, slots=True)
class Ticket:
    """Decode's promise of blocks for one attempt.

    table covers n + 1 tokens (the prompt and the token sampled by prefill); its first `num_cached_blocks` blocks
    already hold their KV. epoch counts up within a decode incarnation and names the ticket.
    """

    incarnation: Incarnation
    epoch: int
    table: BlockTable
    num_cached_blocks: int = 0

    def expected_positions(self, num_tokens: int) -> range:
        """Logical block positions a writer must fill for a prompt of `num_tokens`."""
        return range(self.num_cached_blocks, blocks_for(num_tokens, self.table.block_size))


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """How many blocks of a pool are in each state; total is their sum."""

    total: int
    free: int
    held: int = 0
    cached: int = 0
    reserved: int = 0
    quarantined: int = 0


@dataclass(frozen=True, slots=True)
class BlockKey:
    """Content key of a full block. Cannot be built without a tenant; see `block_keys`."""

    digest: bytes


@dataclass(frozen=True, slots=True)
class KeyScope:
    """What must be equal, beside the tokens, for two blocks to hold the same KV and be shared."""

    tenant: str
    model_fingerprint: str
    adapter: str = ""
    cache_salt: str = ""
    layer_group: int = 0


class KeyChain:
    """Keys of the full blocks of one sequence, made as its tokens become known: BLAKE2b over (parent, tokens, scope).

    The scope's parts are length-framed and stand at the root, so that no two scopes have a key in common.
    """

    __slots__ = ("_block_size", "_parent")

    def __init__(self, scope: KeyScope, block_size: int) -> None:
        parts = (scope.tenant, scope.model_fingerprint, scope.adapter, scope.cache_salt, str(scope.layer_group))
        root = hashlib.blake2b(digest_size=32)
        for part in parts:
            raw = part.encode()
            root.update(len(raw).to_bytes(8, "little") + raw)
        self._block_size = block_size
        self._parent = root.digest()

    def copy(self) -> KeyChain:
        """Another chain that goes on from the same tokens."""
        other = KeyChain.__new__(KeyChain)
        other._block_size, other._parent = self._block_size, self._parent
        return other

    def extend(self, token_ids: Sequence[int]) -> list[BlockKey]:
        """Keys of the next full blocks, whose tokens these are; what does not fill a block is left out."""
        words = array("I", token_ids)
        if sys.byteorder == "big":
            words.byteswap()
        raw, size = words.tobytes(), self._block_size * words.itemsize
        parent, blake2b, keys = self._parent, hashlib.blake2b, []
        for start in range(0, len(raw) - size + 1, size):
            parent = blake2b(parent + raw[start : start + size], digest_size=32).digest()
            keys.append(BlockKey(parent))
        self._parent = parent
        return keys


def block_keys(scope: KeyScope, token_ids: Sequence[int], block_size: int) -> tuple[BlockKey, ...]:
    """Keys of the full blocks of `token_ids`, in order."""
    return tuple(KeyChain(scope, block_size).extend(token_ids))


class BlockEventKind(enum.StrEnum):
    """What happened to the cached content of a pool."""

    STORED = "stored"
    EVICTED = "evicted"
    CLEARED = "cleared"
    """Nothing is cached any more; names no keys."""


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Events of one kind that came one after the other. Each key is one event; so is CLEARED, which has none."""

    kind: BlockEventKind
    keys: tuple[BlockKey, ...] = ()

    def __len__(self) -> int:
        return len(self.keys) or 1


@dataclass(frozen=True, slots=True)
class BlockEvents:
    """Events of one worker's cache, in order. first: number of the first one; they count up by one from 1 on.

    A reader that has seen others than first - 1 events has missed some and must ask for the whole list.
    """

    first: int
    runs: tuple[BlockRun, ...]

    @property
    def next(self) -> int:
        """Number of the event after the last one here."""
        return self.first + sum(map(len, self.runs))


@dataclass(frozen=True, slots=True)
class BlockList:
    """Everything a worker caches, as of event `next` - 1."""

    next: int
    keys: tuple[BlockKey, ...]
