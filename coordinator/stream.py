"""What is on its way to one client: a buffer between the dispatcher and the handler that writes. Knows no protos.

The dispatcher puts, the handler takes; one wake-up however many items. Bytes are an estimate; they bound the buffer.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass

from kvrelay.errors import KVRelayError
from kvrelay.requests import FinishReason, Logprobs
from kvrelay.session import Pushed

ITEM_BYTES = 64
"""What an item costs beside its text."""
LOGPROB_BYTES = 16
"""What each of the likeliest tokens costs that an item names."""


@dataclass(frozen=True, slots=True)
class TokenItem:
    index: int
    token_id: int
    text: str
    offset_s: float
    sequence: int = 0
    logprobs: Logprobs | None = None

    @property
    def num_bytes(self) -> int:
        size = ITEM_BYTES + len(self.text)
        return size if self.logprobs is None else size + LOGPROB_BYTES * (1 + len(self.logprobs.top))


@dataclass(frozen=True, slots=True)
class FinishItem:
    """text: held back until the end. pushed: what the hand-off cost, None if nothing was handed over.

    migrations: how often the sequence was moved to another placement. num_cached_blocks: those that decode had.
    """

    reason: FinishReason
    text: str
    completion_tokens: int
    cached_tokens: int
    offset_s: float
    prefill_worker: str
    decode_worker: str
    pushed: Pushed | None
    migrations: int = 0
    num_cached_blocks: int = 0
    sequence: int = 0


@dataclass(frozen=True, slots=True)
class ErrorItem:
    error: KVRelayError


Item = TokenItem | FinishItem | ErrorItem


class StreamBuffer:
    """limit_bytes bounds what waits for the reader. Each sequence ends with its FinishItem, all of them with one error:
    what is put after an ErrorItem is dropped.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._items: deque[Item] = deque()
        self._limit_bytes = limit_bytes
        self._bytes = 0
        self._failed = False
        self._waiter: asyncio.Future[None] | None = None
        self._writer: asyncio.Task[object] | None = None
        self._writing_since = 0.0
        self.cut: KVRelayError | None = None
        """Set when the reader was given up while a write to it was stuck."""

    def put(self, item: Item) -> bool:
        """False when the reader is too slow; the item is in all the same."""
        if self._failed:
            return True
        self._items.append(item)
        if type(item) is TokenItem:
            self._bytes += item.num_bytes
        elif type(item) is ErrorItem:
            self._failed = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        return self._bytes <= self._limit_bytes

    async def take(self) -> Item:
        """The next item; waits for it."""
        while not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        item = self._items.popleft()
        if type(item) is TokenItem:
            self._bytes -= item.num_bytes
        return item

    def writing(self, task: asyncio.Task[object] | None) -> float:
        """The handler says which task is about to write, and None when it has written. The time of it."""
        self._writer = task
        self._writing_since = now = time.monotonic()
        return now

    def stuck_s(self, now: float) -> float:
        """How long the write under way has taken; 0 without one."""
        return now - self._writing_since if self._writer is not None else 0.0

    def cut_off(self, error: KVRelayError) -> None:
        """Drop what waits and what may still come. A stuck write is cancelled; else the handler finds the error."""
        self._items.clear()
        self._bytes = 0
        self._failed = False
        self.cut = error
        self.put(ErrorItem(error))
        if self._writer is not None:
            self._writer.cancel()
