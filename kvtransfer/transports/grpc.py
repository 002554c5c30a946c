"""Blocks as frames over the link, for hosts without one-sided writes. Knows dataclasses, not the stream itself."""

from __future__ import annotations

from collections.abc import Callable

from kvrelay.blocks import Ticket
from kvrelay.link import BlockData, PartManifest
from kvrelay.requests import Incarnation
from kvtransfer.store import BlockStore
from kvtransfer.transports.base import Part, TransportEvent

MAX_DATA_BYTES = 200 * 1024


class GrpcTransport:
    """Signatures first. `send(peer, message)` may block while the link is full; it raises if the link is gone."""

    name = "grpc"
    refuses_late = True

    def __init__(
        self,
        store: BlockStore,
        send: Callable[[Incarnation, BlockData | PartManifest], None],
        *,
        on_event: Callable[[TransportEvent], None] | None = None,
    ) -> None: ...

    def expect(self, ticket: Ticket) -> None: ...
    def unexpect(self, epoch: int) -> None: ...
    def post(self, part: Part) -> None: ...
    def poll(self) -> tuple[TransportEvent, ...]: ...
    def close(self) -> None: ...
