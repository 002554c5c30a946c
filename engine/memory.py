"""The bytes of one KV pool in host memory. Knows the layout of a block; nothing of who uses which block or how."""

from __future__ import annotations

import ctypes
import mmap

from kvrelay.blocks import KVLayout
from kvrelay.errors import InvalidArgument


class HostPool:
    """num_blocks blocks in one anonymous private mapping: zeroed, committed page by page at the first touch.

    The shape kvtransfer calls a block store. `base` is the address of block 0, for transports that write by address;
    `buffer` is the whole pool, for tensors mapped over it. Block i starts at i * block_bytes; offsets are Python
    integers, which never wrap.
    """

    def __init__(self, layout: KVLayout, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        self.layout = layout
        self.num_blocks = num_blocks
        self.block_bytes = layout.block_bytes
        self.nbytes = num_blocks * self.block_bytes
        mapping = _mapped(self.nbytes, f"{num_blocks} blocks of {self.block_bytes} bytes")
        if hasattr(mmap, "MADV_HUGEPAGE"):
            mapping.madvise(mmap.MADV_HUGEPAGE)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        self._buffer: memoryview | None = memoryview(mapping)

    @property
    def buffer(self) -> memoryview:
        """All bytes of the pool, writable. The mapping lives as long as any view of it does."""
        if self._buffer is None:
            raise ValueError("the pool is closed")
        return self._buffer

    def read(self, block_id: int) -> memoryview:
        """The bytes of a block, not copied and not writable: what lies there now, also after later writes."""
        start = self._offset(block_id)
        return self.buffer[start : start + self.block_bytes].toreadonly()

    def write(self, block_id: int, offset: int, data: bytes | bytearray | memoryview) -> None:
        """Copy bytes into a block, `offset` bytes after its start."""
        start = self._offset(block_id)
        nbytes = data.nbytes if isinstance(data, memoryview) else len(data)
        if offset < 0 or offset + nbytes > self.block_bytes:
            raise ValueError(f"bytes {offset} .. {offset + nbytes} are not inside a block of {self.block_bytes} bytes")
        self.buffer[start + offset : start + offset + nbytes] = data

    def close(self) -> None:
        """Let go of the memory; it is returned when the last view of it is gone. `base` must not be used any more."""
        self._buffer = None

    def _offset(self, block_id: int) -> int:
        if not 0 <= block_id < self.num_blocks:
            raise ValueError(f"block_id {block_id} is not in a pool of {self.num_blocks} blocks")
        return block_id * self.block_bytes


def _mapped(nbytes: int, what: str) -> mmap.mmap:
    """Memory that is not touched yet. InvalidArgument where the system promises no such amount."""
    try:
        return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        words = f"no memory for {what}, {nbytes / 1e9:.2f} GB: ask for less (--pool-mb, --num-blocks, --swap-mb)"
        raise InvalidArgument(words) from error
