"""What comes over a link goes to the engine no faster than it takes it, whatever the peer sends. Knows no roles."""

from __future__ import annotations

import asyncio

from kvrelay.link import BlockData, PartManifest, ToDecode, ToPrefill
from worker.events import Event
from worker.mailbox import Mailbox

LEAST_BYTES = 1024
"""Of any message, roughly what it takes in memory. So a peer that sends nothing but small ones has to wait for room
long before the mailbox is full, which would end others' sessions, or the process."""


async def post_with_room(mailbox: Mailbox[Event], event: Event, message: ToDecode | ToPrefill) -> None:
    """Post `event`, which holds `message`. Waits for room: the stream's own flow control holds the sender meanwhile."""
    loop = asyncio.get_running_loop()
    taken = asyncio.Event()

    def wake() -> None:
        loop.call_soon_threadsafe(taken.set)

    while not mailbox.has_room():
        taken.clear()
        mailbox.when_taken(wake)
        await taken.wait()
    mailbox.post(event, max(LEAST_BYTES, _size(message)))


def _size(message: ToDecode | ToPrefill) -> int:
    """Bytes of what may be long; names and reasons are bounded where they come in."""
    if isinstance(message, BlockData):
        return len(message.data)
    return len(message.manifest) if isinstance(message, PartManifest) else 0
