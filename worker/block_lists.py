"""Asks the engine thread what it has cached, for callers on the event loop. Knows neither keys nor protos.

Only the engine thread may look at its pool: a question goes into its mailbox, the answer comes back as an action.
"""

from __future__ import annotations

import asyncio
import itertools

from kvrelay.blocks import BlockList
from kvrelay.errors import ResourceExhausted, Unavailable
from worker.events import BlocksAsked, BlocksListed, Event
from worker.mailbox import Mailbox

ANSWER_S = 5.0
"""The engine answers between two steps; one that takes longer has more to do than to tell of its cache."""
MOST_ASKING = 32


class BlockLists:
    """One of each worker, used on its event loop alone."""

    def __init__(self, mailbox: Mailbox[Event]) -> None:
        self._mailbox = mailbox
        self._tokens = itertools.count(1)
        self._asked: dict[int, asyncio.Future[BlockList]] = {}

    async def ask(self) -> BlockList:
        """Everything cached at some moment after the call. Unavailable when the engine does not answer in time."""
        if len(self._asked) >= MOST_ASKING:
            raise ResourceExhausted("too many ask for the list of blocks", retry_after_s=1.0)
        token = next(self._tokens)
        answer: asyncio.Future[BlockList] = asyncio.get_running_loop().create_future()
        self._asked[token] = answer
        try:
            self._mailbox.post(BlocksAsked(token))
            async with asyncio.timeout(ANSWER_S):
                return await answer
        except TimeoutError:
            raise Unavailable(f"the engine did not answer within {ANSWER_S:.0f} s") from None
        finally:
            del self._asked[token]

    def deliver(self, action: BlocksListed) -> None:
        """An answer that nobody waits for any more is dropped."""
        answer = self._asked.get(action.token)
        if answer is not None and not answer.done():
            answer.set_result(action.blocks)
