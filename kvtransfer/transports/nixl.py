"""One-sided writes with NIXL: one owner thread a process does everything with the agent. Knows no tickets' states."""

from __future__ import annotations

from collections.abc import Callable

from kvrelay.blocks import Ticket
from kvrelay.link import PoolDescriptor
from kvrelay.requests import Incarnation
from kvtransfer.store import BlockStore
from kvtransfer.transports.base import Part, TransportEvent


class NixlTransport:
    """Signatures first. Every method may be called from any thread."""

    name = "nixl"
    refuses_late = False

    def __init__(
        self,
        incarnation: Incarnation,
        store: BlockStore,
        *,
        on_event: Callable[[TransportEvent], None] | None = None,
        on_failed: Callable[[BaseException], None] | None = None,
    ) -> None: ...

    def metadata(self) -> bytes: ...
    def pool(self) -> PoolDescriptor: ...
    def add_peer(self, incarnation: Incarnation, metadata: bytes, pool: PoolDescriptor) -> None: ...
    def drop_peer(self, incarnation: Incarnation) -> None: ...
    def expect(self, ticket: Ticket) -> None: ...
    def unexpect(self, epoch: int) -> None: ...
    def post(self, part: Part) -> None: ...
    def poll(self) -> tuple[TransportEvent, ...]: ...
    def close(self) -> None: ...
