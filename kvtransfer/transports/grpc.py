"""Blocks as frames over the link, for hosts without one-sided writes. Knows dataclasses, not the stream itself.

Receiving needs nothing here: the receiver table turns BlockData into writes and refuses what comes too late.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

from kvrelay.blocks import Ticket
from kvrelay.errors import Internal, ResourceExhausted
from kvrelay.fault_points import fault_point
from kvrelay.link import BlockData, PartManifest, PoolDescriptor
from kvrelay.requests import Incarnation
from kvtransfer.store import BlockStore
from kvtransfer.transports.base import Part, TransportEvent, WriteDone, WriteFailed

MAX_DATA_BYTES = 200 * 1024
MAX_QUEUED_PARTS = 1024
JOIN_S = 5.0
HOPELESS = "it waited behind one that the link did not take in time"

Send = Callable[[Incarnation, BlockData | PartManifest], None]


class GrpcTransport:
    """One sending thread per peer, so that a slow decode worker holds up no other.

    send(peer, message): called on those threads; waits while the link is full, raises if it is gone, TimeoutError if it
    stays full for too long.
    on_event: called on those threads for each event, must be quick and not raise; without it events wait for poll().
    on_failed: a sending thread died of this; the process should end.
    """

    name = "grpc"
    refuses_late = True
    hangs_s = 0.0
    """Its threads wait for nothing but links, each time with a bound."""

    def __init__(
        self,
        store: BlockStore,
        send: Send,
        *,
        on_event: Callable[[TransportEvent], None] | None = None,
        on_failed: Callable[[BaseException], None] | None = None,
    ) -> None:
        self._store = store
        self._send = send
        self._events: deque[TransportEvent] = deque()
        self._on_event = on_event or self._events.append
        self._on_failed = on_failed
        self._senders: dict[Incarnation, _Sender] = {}
        self._closed = False
        self._lock = threading.Lock()

    def metadata(self) -> bytes:
        return b""

    def pool(self) -> PoolDescriptor:
        return PoolDescriptor(0, self._store.block_bytes, self._store.num_blocks)

    def add_peer(self, incarnation: Incarnation, metadata: bytes, pool: PoolDescriptor) -> None:
        """Nothing: the link is all it needs."""

    def drop_peer(self, incarnation: Incarnation) -> None:
        """Parts not yet begun end as failed. The link to the peer should be gone, or the thread ends with its part."""
        with self._lock:
            sender = self._senders.pop(incarnation, None)
        if sender is not None:
            sender.end()

    def expect(self, ticket: Ticket) -> None:
        """Nothing: the receiver table knows its tickets."""

    def unexpect(self, epoch: int) -> None:
        """Nothing, as expect."""

    def post(self, part: Part) -> None:
        """Returns at once. WriteDone follows when the link has taken the last frame, whose bytes are copies then."""
        with self._lock:
            if self._closed:
                raise Internal("the transport is closed")
            sender = self._senders.get(part.peer)
            if sender is None:
                sender = _Sender(part.peer, self._store, self._send, self._on_event, self._on_failed)
                self._senders[part.peer] = sender
            sender.take(part)

    def poll(self) -> tuple[TransportEvent, ...]:
        """Events since the last poll; always empty with on_event."""
        return tuple(self._events.popleft() for _ in range(len(self._events)))

    def close(self) -> None:
        """Ends the threads; waits up to JOIN_S for each. Close the links first, or one may wait in its send."""
        with self._lock:
            self._closed = True
            senders = list(self._senders.values())
            self._senders.clear()
        for sender in senders:
            sender.end()
        for sender in senders:
            sender.join()


class _Sender:
    """The thread that writes to one peer, part after part, until end()."""

    def __init__(
        self,
        peer: Incarnation,
        store: BlockStore,
        send: Send,
        on_event: Callable[[TransportEvent], None],
        on_failed: Callable[[BaseException], None] | None,
    ) -> None:
        self._store, self._send, self._on_event, self._on_failed = store, send, on_event, on_failed
        self._parts: queue.Queue[Part | None] = queue.Queue()
        self._ending = False
        self._num_hopeless = 0
        """So many of the parts that wait did so behind one that the link did not take in time: they fail with it, or
        each would hold its blocks for as long again."""
        self._thread = threading.Thread(target=self._run, name=f"kv-send-{peer}", daemon=True)
        self._thread.start()

    def take(self, part: Part) -> None:
        """Raises ResourceExhausted, and no event follows, if too much waits for this peer."""
        if self._parts.qsize() >= MAX_QUEUED_PARTS:
            raise ResourceExhausted(f"{MAX_QUEUED_PARTS} parts wait for {part.peer}", retry_after_s=1.0)
        self._parts.put(part)

    def end(self) -> None:
        self._ending = True
        self._parts.put(None)

    def join(self) -> None:
        self._thread.join(JOIN_S)

    def _run(self) -> None:
        try:
            while (part := self._parts.get()) is not None:
                fault_point("transport.poll")
                self._on_event(self._write(part))
        except BaseException as error:
            if self._on_failed is None:
                raise
            self._on_failed(error)

    def _write(self, part: Part) -> TransportEvent:
        if self._ending:
            return WriteFailed(part.peer, part.epoch, part.part, "the peer was dropped", posted=False)
        if self._num_hopeless:
            self._num_hopeless -= 1
            return WriteFailed(part.peer, part.epoch, part.part, HOPELESS, posted=False)
        begun_at = time.monotonic()
        try:
            for message in frames(self._store, part):
                self._send(part.peer, message)
        except Exception as error:  # whatever the link raises ends this write, not the thread
            if isinstance(error, TimeoutError):
                self._num_hopeless = self._parts.qsize()
            return WriteFailed(part.peer, part.epoch, part.part, f"{type(error).__name__}: {error}")
        return WriteDone(part.peer, part.epoch, part.part, time.monotonic() - begun_at)


def frames(store: BlockStore, part: Part) -> Iterator[BlockData | PartManifest]:
    """The part as messages of at most MAX_DATA_BYTES of data, block after block, its manifest last."""
    for position, block_id in zip(part.positions, part.source_ids, strict=True):
        view = store.read(block_id)
        for offset in range(0, store.block_bytes, MAX_DATA_BYTES):
            data = bytes(view[offset : offset + MAX_DATA_BYTES])
            yield BlockData(part.epoch, part.part, position, offset, data)
    yield PartManifest(part.manifest)
