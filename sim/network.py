"""Connections between nodes: ordered, delayed, bounded, cut at any message. Knows no protocol.

What a process's kernel does is here: when a process dies its connections are closed, when it stands still they are not.
A message that was sent may be lost only with its connection, and then with everything after it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from kvrelay.errors import KVRelayError, Unavailable
from sim.world import Node, World
from worker.link_client import REFUSED

WINDOW = 256
"""Messages under way and unread in one direction before its writer waits, unless the seed says otherwise."""
KERNEL_GIVES_UP_S = 40.0
"""A connection to a host that vanished is reset after so long."""
DIAL_TIMEOUT_S = 5.0
SLOWEST_MESSAGE_S = 0.4
"""With the fault of slow messages."""

Handler = Callable[["End"], Coroutine[Any, Any, None]]


class Broken(Unavailable):
    """The connection was reset."""


@dataclass
class _Closed:
    """The last message of one direction: the other side ended the call, well or with an error."""

    error: KVRelayError | None = None


class End:
    """One side of a connection. `write` waits while the window is full; `read` gives None at a good end."""

    def __init__(self, net: Network, node: Node, kind: str) -> None:
        self.net, self.node, self.kind = net, node, kind
        self.peer: End
        self.inbox: deque[Any] = deque()
        self.out: deque[tuple[float, Any]] = deque()
        """Sent and not yet there: (when it may arrive, message)."""
        self.last_at = 0.0
        self.serves = False
        """The side that was dialled."""
        self.broken = False
        self.closed = False
        self.ended: _Closed | None = None
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None
        self.on_broken: Callable[[], None] | None = None

    async def write(self, message: Any) -> None:
        while not self.broken and not self.closed and len(self.out) + len(self.peer.inbox) >= self.net.window:
            self._writer = self.node.loop.create_future()
            await self._writer
        if self.broken or self.peer.closed or self.closed:
            raise Broken(f"the {self.kind} connection is gone")
        self.net.send(self, message)

    async def read(self) -> Any:
        while not self.inbox and not self.broken and self.ended is None:
            self._reader = self.node.loop.create_future()
            await self._reader
        if self.inbox:
            message = self.inbox.popleft()
            self.peer._wake_writer()
            return message
        if self.ended is not None:
            if self.ended.error is not None:
                raise self.ended.error
            return None
        raise Broken(f"the {self.kind} connection is gone")

    def close(self, error: KVRelayError | None = None) -> None:
        """End the call in good order; the other side reads it after all that was written."""
        if not self.closed and not self.broken and self.node.alive:
            self.net.send(self, _Closed(error))
            self.closed = True

    def deliver(self, message: Any) -> None:
        if isinstance(message, _Closed):
            self.ended = message
            if self.on_broken is not None:
                self.on_broken()
        else:
            self.inbox.append(message)
        self._wake(self._reader)
        self._wake_writer()

    def reset(self) -> None:
        """Unread messages are lost too, and what is under way."""
        if not self.broken:
            self.broken = True
            self.inbox.clear()
            self.out.clear()
            self._wake(self._reader)
            self._wake_writer()
            if self.on_broken is not None:
                self.on_broken()

    def _wake_writer(self) -> None:
        self._wake(self._writer)

    def _wake(self, future: asyncio.Future[None] | None) -> None:
        if future is not None and not future.done() and self.node.alive:
            future.set_result(None)


class Network:
    """Who listens where, all connections, and what goes wrong with them."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.ends: list[End] = []
        self.cut_chance: dict[str, float] = {}
        """Of each message, by kind of connection: it is cut there."""
        self.slow_chance = 0.0
        self.num_cut = 0
        self.window = WINDOW
        self.may_cut: Callable[[End], bool] = lambda _: True
        self._listening: dict[str, tuple[Node, Mapping[str, Handler]]] = {}
        self._clogged: dict[tuple[str, str], float] = {}
        self._vanished: set[Node] = set()

    def listen(self, node: Node, address: str, handlers: Mapping[str, Handler]) -> None:
        """By kind of call. A dead node's address is free again."""
        self._listening[address] = (node, handlers)

    async def connect(self, node: Node, address: str, kind: str) -> End:
        """Raises Unavailable when nobody answers."""
        answered: asyncio.Future[End | None] = node.loop.create_future()
        self.world.after(self._latency(node.name, address), lambda: self._accept(node, address, kind, answered))
        try:
            async with asyncio.timeout(DIAL_TIMEOUT_S):
                end = await answered
        except TimeoutError:
            raise Unavailable(f"{address} does not answer") from None
        if end is None:
            raise Unavailable(f"nobody listens at {address}: {REFUSED}")
        return end

    def _accept(self, node: Node, address: str, kind: str, answered: asyncio.Future[End | None]) -> None:
        if not node.alive or answered.done():
            return
        listener, handlers = self._listening.get(address, (None, {}))
        if listener is not None and (listener in self._vanished or node in self._vanished):
            return
        if listener is None or not listener.alive or kind not in handlers:
            answered.set_result(None)
            return
        near, far = End(self, node, kind), End(self, listener, kind)
        near.peer, far.peer, far.serves = far, near, True
        self.ends += [near, far]
        listener.spawn(self._serve(far, handlers[kind]), f"{kind} of {node.name}")
        answered.set_result(near)

    async def _serve(self, end: End, handler: Handler) -> None:
        """A call's handler: cancelled when the other side is gone, as a server does; its error ends the call."""
        task = asyncio.ensure_future(handler(end))

        def cancel() -> None:
            end.node.loop.call_soon(task.cancel)

        end.on_broken = cancel
        if end.broken or end.ended:
            task.cancel()
        error: KVRelayError | None = None
        try:
            await asyncio.wait([task])
            if not task.cancelled() and (raised := task.exception()) is not None:
                if isinstance(raised, KVRelayError):
                    error = raised
                else:
                    end.node.loop.call_exception_handler({"message": f"{end.kind} handler", "exception": raised})
        finally:
            end.on_broken = None
            end.close(error)
            self._forget(end)

    def _forget(self, end: End) -> None:
        if end in self.ends:
            self.ends.remove(end)

    # messages

    def send(self, end: End, message: Any) -> None:
        """On its way; FIFO in its direction."""
        world = self.world
        if not end.node.alive or end.node in self._vanished or end.peer.node in self._vanished:
            return
        end.last_at = max(end.last_at + 1e-6, world.now + self._latency(end.node.name, end.peer.node.name))
        end.out.append((end.last_at, message))
        world.at(end.last_at, lambda: self._pump(end))
        chance = self.cut_chance.get(end.kind)
        if chance and world.rng.random() < chance and self.may_cut(end):
            self.cut(end)

    def _pump(self, end: End) -> None:
        """Deliver what has arrived by now, in order."""
        clogged = self._clogged.get((end.node.name, end.peer.node.name), 0.0)
        if clogged > self.world.now and end.out:
            self.world.at(clogged, lambda: self._pump(end))
            return
        while end.out and end.out[0][0] <= self.world.now:
            message = end.out.popleft()[1]
            if not end.peer.broken and end.peer.node.alive:
                end.peer.deliver(message)

    def cut(self, end: End) -> None:
        """Reset, seen by both sides a little apart; what is under way or unread is lost in both directions.

        One in three links ends for the writer alone: nothing comes to decode any more, and its kernel does not say so.
        """
        self.num_cut += 1
        halved = end.kind == "link" and self.num_cut % 3 == 0
        how = "cuts one end of" if halved else "cuts"
        self.world.trace("network", f"{how} {end.kind} of {end.node.name} and {end.peer.node.name}")
        for side in (end, end.peer):
            seen_after = self.world.rng.uniform(0.0, 0.02)
            self.world.after(KERNEL_GIVES_UP_S if halved and side.serves else seen_after, side.reset)

    def _latency(self, a: str, b: str) -> float:
        rng = self.world.rng
        if self.slow_chance and rng.random() < self.slow_chance:
            return rng.uniform(0.01, SLOWEST_MESSAGE_S)
        return rng.uniform(0.0002, 0.002)

    # what happens to nodes

    def died(self, node: Node) -> None:
        """Its kernel closes its connections: the peers see an end of file after what was sent, or a reset."""
        rng = self.world.rng
        for end in [e for e in self.ends if e.node is node]:
            if rng.random() < 0.5:
                self.world.after(rng.uniform(0.0, 0.01), end.peer.reset)
            else:
                end.last_at = max(end.last_at, self.world.now) + 0.001
                end.out.append((end.last_at, _Closed(Broken("its process died"))))
                self.world.at(end.last_at, lambda end=end: self._pump(end))  # type: ignore[misc]
            end.broken = True
        self.ends = [e for e in self.ends if e.node is not node]

    def vanish(self, node: Node) -> None:
        """Its host is gone without a word: nobody is told until their kernels give up."""
        self._vanished.add(node)
        for end in [e for e in self.ends if e.node is node]:
            self.world.after(KERNEL_GIVES_UP_S, end.peer.reset)
        self.ends = [e for e in self.ends if e.node is not node]

    def clog(self, a: str, b: str, seconds: float) -> None:
        """Nothing goes from `a` to `b` for so long; it waits."""
        self._clogged[a, b] = self.world.now + seconds

    def unclog(self) -> None:
        self._clogged.clear()
        for end in self.ends:
            self._pump(end)
