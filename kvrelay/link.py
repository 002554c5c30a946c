"""What a prefill and a decode worker tell each other over their link. Knows neither protos nor sockets.

A ticket is named by its epoch, which counts up within the decode worker's incarnation; the link is bound to both
incarnations by its first two messages.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.blocks import KVLayout
from kvrelay.requests import Incarnation, RequestId, WorkerId
from kvrelay.session import PROTOCOL_VERSION

LEASE_S = 15.0
"""How long a writer may start writes without renewing; counted by the writer from before it sent open or renew.

Long against a step, since renewals are answered between steps; its end frees nothing."""
LEASE_MARGIN_S = 1.0
"""The writer stops starting writes this long before its lease ends."""


@dataclass(frozen=True, slots=True)
class PoolDescriptor:
    """Where a decode worker's pool lies, for one-sided writes: base address, bytes of a block, number of blocks."""

    base: int
    block_bytes: int
    num_blocks: int
    device: str = "cpu"
    device_id: int = 0


@dataclass(frozen=True, slots=True)
class LinkHello:
    """First message up. decode answers LinkWelcome, or ends the stream with FAILED_PRECONDITION naming the field.

    verify_kv: manifests carry a checksum of each block.
    """

    worker_id: WorkerId
    incarnation: Incarnation
    decode_incarnation: Incarnation
    model_fingerprint: str
    layout: KVLayout
    transport: str
    transport_metadata: bytes = b""
    protocol_version: int = PROTOCOL_VERSION
    verify_kv: bool = False


@dataclass(frozen=True, slots=True)
class LinkWelcome:
    worker_id: WorkerId
    incarnation: Incarnation
    layout: KVLayout
    transport: str
    pool: PoolDescriptor
    transport_metadata: bytes = b""
    lease_s: float = LEASE_S


# prefill -> decode


@dataclass(frozen=True, slots=True)
class OpenTicket:
    epoch: int
    incarnation: Incarnation
    request_id: RequestId
    attempt: int


@dataclass(frozen=True, slots=True)
class Renew:
    epoch: int


@dataclass(frozen=True, slots=True)
class Fenced:
    """Every posted write of the ticket ended DONE, and no other will be posted."""

    epoch: int


@dataclass(frozen=True, slots=True)
class BlockData:
    """grpc transport: bytes of the block at logical position `position` of the ticket, from byte `offset` on."""

    epoch: int
    part: int
    position: int
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class PartManifest:
    """grpc transport: the manifest of a part, sent after its bytes. The nixl transport sends it as the notification."""

    manifest: bytes


# decode -> prefill


@dataclass(frozen=True, slots=True)
class Opened:
    epoch: int
    lease_s: float


@dataclass(frozen=True, slots=True)
class OpenRefused:
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class Renewed:
    epoch: int
    lease_s: float


@dataclass(frozen=True, slots=True)
class LandedNotice:
    epoch: int


@dataclass(frozen=True, slots=True)
class AbortedNotice:
    """Decode wants no more of this ticket: the writer stops posting, waits for its writes, says Fenced."""

    epoch: int
    reason: str


ToDecode = LinkHello | OpenTicket | Renew | Fenced | BlockData | PartManifest
ToPrefill = LinkWelcome | Opened | OpenRefused | Renewed | LandedNotice | AbortedNotice
