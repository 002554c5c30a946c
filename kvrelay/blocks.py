"""The shared block-table format and the shape of a block. Knows neither pools nor wires."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
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
        if blocks_for(self.num_tokens, self.block_size) > len(self.block_ids):
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


def block_keys(scope: KeyScope, token_ids: Sequence[int], block_size: int) -> Iterator[BlockKey]:
    """Keys of the full blocks of `token_ids`, in order: BLAKE2b over (parent, tokens, scope), length-framed."""
    parts = (scope.tenant, scope.model_fingerprint, scope.adapter, scope.cache_salt, str(scope.layer_group))
    root = hashlib.blake2b(digest_size=32)
    for part in parts:
        raw = part.encode()
        root.update(len(raw).to_bytes(8, "little") + raw)
    parent = root.digest()
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        h = hashlib.blake2b(parent, digest_size=32)
        h.update(b"".join(t.to_bytes(4, "little") for t in token_ids[start : start + block_size]))
        parent = h.digest()
        yield BlockKey(parent)
