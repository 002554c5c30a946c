"""One-sided writes with NIXL: one owner thread a process does everything with the agent. Knows no tickets' states.

The owner polls only while a ticket is expected or a write is posted, and sleeps on its queue otherwise.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from kvrelay.blocks import Ticket
from kvrelay.errors import Internal, KVRelayError, ResourceExhausted, Unavailable
from kvrelay.fault_points import fault_point
from kvrelay.link import PoolDescriptor
from kvrelay.requests import Incarnation
from kvtransfer.store import BlockStore
from kvtransfer.transports.base import NotificationArrived, Part, TransportEvent, WriteDone, WriteFailed
from kvtransfer.transports.nixl_agent import PoolAgent

POLL_S = 0.0002
QUIET_POLL_S, QUIET_AFTER_S = 0.0005, 0.02
"""A ticket may stay open for long while its prompt is computed: then looking less often halves what looking costs."""
SPIN_S = 0.0001
"""After a post: small writes end sooner than a sleep would."""
LINGER_S = 0.05
"""Go on polling this long after the last ticket: the writer's side of a write may end a little after ours."""
MAX_QUEUED = 4096
CALL_TIMEOUT_S = 30.0


@dataclass(slots=True)
class _Write:
    part: Part
    handle: Any
    posted_at: float
    error: str = ""
    """Why it ended, while its handle cannot be released yet."""


class NixlTransport:
    """Every method may be called from any thread.

    on_event: called on the owner thread for each event, must be quick and not raise; without it events wait for poll().
    on_failed: the owner thread died of this; nothing works any more and the process should end.
    """

    name = "nixl"
    refuses_late = False

    def __init__(
        self,
        incarnation: Incarnation,
        store: BlockStore,
        *,
        on_event: Callable[[TransportEvent], None] | None = None,
        on_failed: Callable[[BaseException], None] | None = None,
        agent: Callable[[Incarnation, BlockStore], PoolAgent] = PoolAgent,
    ) -> None:
        """Starts the owner thread and waits for the agent. Raises what its start raised."""
        self._events: deque[TransportEvent] = deque()
        self._on_event = on_event or self._events.append
        self._on_failed = on_failed
        self._commands: queue.Queue[Callable[[], None]] = queue.Queue(MAX_QUEUED)
        self._writes: list[_Write] = []
        self._expected: set[int] = set()
        self._poll_until = 0.0
        self._moved_at = 0.0
        self._closing = False
        self._at_it_since: float | None = None
        """Since when the owner is at the one thing it does now; None while it waits for something to do."""
        self._died: BaseException | None = None
        ready: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._own, args=(agent, incarnation, store, ready), name="nixl-owner", daemon=True
        )
        self._thread.start()
        ready.result()

    @property
    def hangs_s(self) -> float:
        """How long the owner has not come round: what was asked of it, and all writes and manifests, wait meanwhile."""
        since = self._at_it_since
        return 0.0 if since is None else time.monotonic() - since

    def metadata(self) -> bytes:
        """What a peer's add_peer needs, with pool()."""
        return self._agent.metadata

    def pool(self) -> PoolDescriptor:
        return self._agent.pool

    def add_peer(self, incarnation: Incarnation, metadata: bytes, pool: PoolDescriptor) -> None:
        """Waits until the peer may be written to. Raises FailedPrecondition if it cannot be reached."""
        self._call(lambda: self._agent.add_peer(incarnation, metadata, pool))

    def drop_peer(self, incarnation: Incarnation) -> None:
        """Waits until descriptors and connection of the peer are gone; its writes in flight end as failed."""
        self._call(lambda: self._drop_peer(incarnation))

    def expect(self, ticket: Ticket) -> None:
        self._put(lambda: self._expect(ticket.epoch))

    def unexpect(self, epoch: int) -> None:
        self._put(lambda: self._unexpect(epoch))

    def post(self, part: Part) -> None:
        """Raises ResourceExhausted if the owner is far behind, Internal if it is dead; else one event follows."""
        self._put(lambda: self._post(part))

    def poll(self) -> tuple[TransportEvent, ...]:
        """Events since the last poll; always empty with on_event."""
        return tuple(self._events.popleft() for _ in range(len(self._events)))

    def close(self) -> None:
        """Ends the owner thread and the agent. Writes in flight get no event. Twice is once."""
        if self._thread.is_alive():
            self._put(self._close)
            self._thread.join(CALL_TIMEOUT_S)

    def _put(self, command: Callable[[], None]) -> None:
        if self._died is not None or not self._thread.is_alive():
            raise Internal(f"the nixl owner thread is dead: {self._died}")
        try:
            self._commands.put(command, timeout=1.0)
        except queue.Full:
            raise ResourceExhausted("the nixl owner thread does not keep up", retry_after_s=1.0) from None

    def _call(self, action: Callable[[], None]) -> None:
        done: Future[None] = Future()

        def run() -> None:
            try:
                action()
                done.set_result(None)
            except Exception as error:
                done.set_exception(error)

        self._put(run)
        try:
            done.result(CALL_TIMEOUT_S)
        except TimeoutError:
            raise Unavailable(f"the nixl owner thread did not answer within {CALL_TIMEOUT_S:g} s") from None

    # below: the owner thread only

    def _own(
        self,
        agent: Callable[[Incarnation, BlockStore], PoolAgent],
        incarnation: Incarnation,
        store: BlockStore,
        ready: Future[None],
    ) -> None:
        try:
            self._agent = agent(incarnation, store)
        except BaseException as error:
            ready.set_exception(error)
            return
        ready.set_result(None)
        try:
            while not self._closing:
                self._beat()
            self._shut()
        except BaseException as error:
            self._died = error
            if self._on_failed is None:
                raise
            self._on_failed(error)

    def _beat(self) -> None:
        """Commands first; then, if anything can move, one look at everything that moves."""
        now = time.monotonic()
        busy = bool(self._writes or self._expected) or now < self._poll_until
        spinning = busy and bool(self._writes) and now < self._writes[-1].posted_at + SPIN_S
        quiet = not self._writes and now > self._moved_at + QUIET_AFTER_S
        self._take_commands(0.0 if spinning else None if not busy else QUIET_POLL_S if quiet else POLL_S)
        if busy:
            self._at_it_since = time.monotonic()
            self._look()
        self._at_it_since = None

    def _take_commands(self, wait_s: float | None) -> None:
        """Wait for the first command (None: for ever; 0: not at all), then take all that are there."""
        try:
            command = self._commands.get(block=wait_s != 0.0, timeout=wait_s)
            while True:
                self._at_it_since = time.monotonic()
                command()
                command = self._commands.get_nowait()
        except queue.Empty:
            return

    def _look(self) -> None:
        fault_point("transport.poll")
        for write in list(self._writes):
            if not write.error:
                self._judge(write, lambda w=write: self._agent.state(w.handle))  # type: ignore[misc]  # bound now
            if write.error and self._agent.release(write.handle):
                self._end(write, WriteFailed(write.part.peer, write.part.epoch, write.part.part, write.error))
        for sender, payload in self._agent.notifications():
            self._moved_at = time.monotonic()
            self._on_event(NotificationArrived(sender, payload))

    def _post(self, part: Part) -> None:
        try:
            handle = self._agent.prepare(part)
        except Exception as error:
            self._on_event(WriteFailed(part.peer, part.epoch, part.part, _text(error), posted=False))
            return
        write = _Write(part, handle, time.monotonic())
        self._writes.append(write)
        self._judge(write, lambda: self._agent.start(handle))

    def _judge(self, write: _Write, ask: Callable[[], str]) -> None:
        """Only DONE is done; every other word than PROC, and every exception, is a failure."""
        try:
            state = ask()
        except Exception as error:  # NIXL's error classes share no base
            write.error = _text(error)
            return
        if state == "DONE":
            self._agent.release(write.handle)
            seconds = time.monotonic() - write.posted_at
            self._end(write, WriteDone(write.part.peer, write.part.epoch, write.part.part, seconds))
        elif state != "PROC":
            write.error = f"state {state}"

    def _end(self, write: _Write, event: TransportEvent) -> None:
        self._writes.remove(write)
        self._on_event(event)

    def _expect(self, epoch: int) -> None:
        self._expected.add(epoch)
        self._moved_at = time.monotonic()

    def _unexpect(self, epoch: int) -> None:
        self._expected.discard(epoch)
        self._poll_until = time.monotonic() + LINGER_S

    def _drop_peer(self, incarnation: Incarnation) -> None:
        for write in [w for w in self._writes if w.part.peer == incarnation]:
            error = write.error or "the peer was dropped"
            self._agent.release(write.handle)
            self._end(write, WriteFailed(incarnation, write.part.epoch, write.part.part, error))
        self._agent.drop_peer(incarnation)

    def _close(self) -> None:
        self._closing = True

    def _shut(self) -> None:
        for write in self._writes:
            self._agent.release(write.handle)
        self._writes.clear()
        self._agent.close()
        del self._agent


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if not isinstance(error, KVRelayError) else error.message
