"""Where a block's bytes lie: the one port between block transfer and the engine's pool. Knows no block states."""

from __future__ import annotations

import zlib
from typing import Protocol


class BlockStore(Protocol):
    """A pool of blocks in one contiguous range of host memory that stays mapped for the life of the process."""

    @property
    def base(self) -> int:
        """Address of block 0."""
        ...

    @property
    def block_bytes(self) -> int: ...

    @property
    def num_blocks(self) -> int: ...

    def read(self, block_id: int) -> memoryview:
        """The bytes of a block, [block_bytes], not copied: valid while the caller's reference on the block lives."""
        ...

    def write(self, block_id: int, offset: int, data: bytes) -> None:
        """Copy `data` into a block from byte `offset` on. The caller owns the block's right to be written."""
        ...


def block_checksum(store: BlockStore, block_id: int) -> int:
    """CRC-32 of a block's bytes, as a manifest carries it."""
    return zlib.crc32(store.read(block_id))
