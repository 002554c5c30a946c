"""Values the block transfer tests share: a pool in memory, a ticket, keys."""

from __future__ import annotations

import ctypes
import mmap

from kvrelay.blocks import BlockTable, Ticket
from kvrelay.requests import Incarnation, RequestId, SequenceKey, SessionId
from kvtransfer.manifest import Manifest

DECODE = Incarnation("decode-1")
PREFILL = Incarnation("prefill-1")
OTHER = Incarnation("prefill-2")
BLOCK_BYTES = 64
MAP_NORESERVE = 0x4000
"""Linux; Python's mmap has no name for it before 3.13."""
BLOCK_SIZE = 16


class MemoryPool:
    """A block store over an anonymous mapping."""

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self.num_blocks, self.block_bytes = num_blocks, block_bytes
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
        self._mapping = mmap.mmap(-1, num_blocks * block_bytes, flags=flags)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        self._view = memoryview(self._mapping)

    def read(self, block_id: int) -> memoryview:
        return self._view[block_id * self.block_bytes : (block_id + 1) * self.block_bytes]

    def write(self, block_id: int, offset: int, data: bytes) -> None:
        assert 0 <= block_id < self.num_blocks
        assert offset + len(data) <= self.block_bytes
        start = block_id * self.block_bytes + offset
        self._view[start : start + len(data)] = data

    def fill(self) -> None:
        """Every block gets content of its own."""
        for block_id in range(self.num_blocks):
            pattern = (block_id * 2654435761 % 2**32).to_bytes(4, "little")
            self.write(block_id, 0, (pattern * (self.block_bytes // 4 + 1))[: self.block_bytes])


def ticket_of(epoch: int = 1, block_ids: tuple[int, ...] = (10, 11, 12, 13), cached: int = 0) -> Ticket:
    """A ticket for a prompt that fills all its blocks but the last slot (n = blocks * 16 - 1)."""
    num_tokens = len(block_ids) * BLOCK_SIZE
    return Ticket(DECODE, epoch, BlockTable(0, BLOCK_SIZE, block_ids, num_tokens), cached)


def prompt_tokens(ticket: Ticket) -> int:
    return ticket.table.num_tokens - 1


def key_of(name: str = "r1", attempt: int = 1) -> SequenceKey:
    return SequenceKey(SessionId("s1"), RequestId(name), attempt)


def manifest_of(
    ticket: Ticket, positions: tuple[int, ...], part: int = 0, writer: Incarnation = PREFILL, last: bool = False
) -> Manifest:
    block_ids = tuple(ticket.table.block_ids[p] for p in positions)
    return Manifest(ticket.epoch, ticket.incarnation, writer, part, positions, block_ids, last)
