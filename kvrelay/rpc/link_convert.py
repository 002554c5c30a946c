"""Messages of a link <-> protos, both directions. Knows neither tickets' states nor the stream they travel in."""

from __future__ import annotations

from typing import assert_never

from kvrelay.errors import InvalidArgument
from kvrelay.link import (
    AbortedNotice,
    BlockData,
    Fenced,
    LandedNotice,
    LinkHello,
    LinkWelcome,
    Opened,
    OpenRefused,
    OpenTicket,
    PartManifest,
    PoolDescriptor,
    Renew,
    Renewed,
    ToDecode,
    ToPrefill,
)
from kvrelay.requests import Incarnation, RequestId, WorkerId
from kvrelay.rpc.description_convert import layout_from_proto, layout_to_proto
from kvrelay.rpc.fields import at_least, only_one, positive, present, raw, text
from kvrelay.v1 import link_pb2

MAX_REASON = 256
"""Characters of a peer's reason that are kept: it is for people, and waits for the engine with others."""


def to_decode_to_proto(message: ToDecode) -> link_pb2.LinkRequest:
    """What prefill sends up its link."""
    match message:
        case BlockData():
            data = link_pb2.BlockData(
                epoch=message.epoch,
                part=message.part,
                position=message.position,
                offset=message.offset,
                data=message.data,
            )
            return link_pb2.LinkRequest(block_data=data)
        case PartManifest():
            return link_pb2.LinkRequest(part_manifest=link_pb2.PartManifest(manifest=message.manifest))
        case OpenTicket():
            ticket = link_pb2.OpenTicket(
                epoch=message.epoch,
                incarnation=message.incarnation,
                request_id=message.request_id,
                attempt=message.attempt,
            )
            return link_pb2.LinkRequest(open=ticket)
        case Renew():
            return link_pb2.LinkRequest(renew=link_pb2.Renew(epoch=message.epoch))
        case Fenced():
            return link_pb2.LinkRequest(fenced=link_pb2.Fenced(epoch=message.epoch))
        case LinkHello():
            return link_pb2.LinkRequest(hello=_hello_to_proto(message))
        case _ as never:
            assert_never(never)


def to_decode_from_proto(proto: link_pb2.LinkRequest, path: str = "link") -> ToDecode:
    kind = proto.WhichOneof("kind")
    match kind:
        case "block_data":
            block = proto.block_data
            data = raw(block.data, f"{path}.block_data.data")
            return BlockData(block.epoch, block.part, block.position, block.offset, data)
        case "part_manifest":
            return PartManifest(raw(proto.part_manifest.manifest, f"{path}.part_manifest.manifest"))
        case "open":
            return _open_from_proto(proto.open, f"{path}.open")
        case "renew":
            return Renew(proto.renew.epoch)
        case "fenced":
            return Fenced(proto.fenced.epoch)
        case "hello":
            return _hello_from_proto(proto.hello, f"{path}.hello")
        case None:
            raise _no_kind(path)
        case _ as never:
            assert_never(never)


def to_prefill_to_proto(message: ToPrefill) -> link_pb2.LinkResponse:
    """What decode sends down the link."""
    match message:
        case Opened():
            return link_pb2.LinkResponse(opened=link_pb2.Opened(epoch=message.epoch, lease_s=message.lease_s))
        case OpenRefused():
            refused = link_pb2.OpenRefused(epoch=message.epoch, reason=message.reason)
            return link_pb2.LinkResponse(open_refused=refused)
        case Renewed():
            return link_pb2.LinkResponse(renewed=link_pb2.Renewed(epoch=message.epoch, lease_s=message.lease_s))
        case LandedNotice():
            return link_pb2.LinkResponse(landed=link_pb2.LandedNotice(epoch=message.epoch))
        case AbortedNotice():
            aborted = link_pb2.AbortedNotice(epoch=message.epoch, reason=message.reason)
            return link_pb2.LinkResponse(aborted=aborted)
        case LinkWelcome():
            return link_pb2.LinkResponse(welcome=_welcome_to_proto(message))
        case _ as never:
            assert_never(never)


def to_prefill_from_proto(proto: link_pb2.LinkResponse, path: str = "link") -> ToPrefill:
    kind = proto.WhichOneof("kind")
    match kind:
        case "opened":
            return Opened(proto.opened.epoch, positive(proto.opened.lease_s, f"{path}.opened.lease_s"))
        case "open_refused":
            return OpenRefused(proto.open_refused.epoch, proto.open_refused.reason[:MAX_REASON])
        case "renewed":
            return Renewed(proto.renewed.epoch, positive(proto.renewed.lease_s, f"{path}.renewed.lease_s"))
        case "landed":
            return LandedNotice(proto.landed.epoch)
        case "aborted":
            return AbortedNotice(proto.aborted.epoch, proto.aborted.reason[:MAX_REASON])
        case "welcome":
            return _welcome_from_proto(proto.welcome, f"{path}.welcome")
        case None:
            raise _no_kind(path)
        case _ as never:
            assert_never(never)


def _no_kind(path: str) -> InvalidArgument:
    return InvalidArgument(f"{path}.kind is missing, or a message newer than this version", field=f"{path}.kind")


def _open_from_proto(proto: link_pb2.OpenTicket, path: str) -> OpenTicket:
    return OpenTicket(
        epoch=proto.epoch,
        incarnation=Incarnation(text(proto.incarnation, f"{path}.incarnation")),
        request_id=RequestId(text(proto.request_id, f"{path}.request_id")),
        attempt=proto.attempt,
    )


def _hello_to_proto(hello: LinkHello) -> link_pb2.LinkHello:
    return link_pb2.LinkHello(
        worker_id=hello.worker_id,
        incarnation=hello.incarnation,
        decode_incarnation=hello.decode_incarnation,
        model_fingerprint=hello.model_fingerprint,
        layouts=[layout_to_proto(hello.layout)],
        transport=hello.transport,
        transport_metadata=hello.transport_metadata,
        protocol_version=hello.protocol_version,
        verify_kv=hello.verify_kv,
    )


def _hello_from_proto(proto: link_pb2.LinkHello, path: str) -> LinkHello:
    layout = only_one(proto.layouts, f"{path}.layouts")
    return LinkHello(
        worker_id=WorkerId(text(proto.worker_id, f"{path}.worker_id")),
        incarnation=Incarnation(text(proto.incarnation, f"{path}.incarnation")),
        decode_incarnation=Incarnation(text(proto.decode_incarnation, f"{path}.decode_incarnation")),
        model_fingerprint=text(proto.model_fingerprint, f"{path}.model_fingerprint"),
        layout=layout_from_proto(layout, f"{path}.layouts[0]"),
        transport=text(proto.transport, f"{path}.transport"),
        transport_metadata=proto.transport_metadata,
        protocol_version=at_least(proto.protocol_version, 1, f"{path}.protocol_version"),
        verify_kv=proto.verify_kv,
    )


def _welcome_to_proto(welcome: LinkWelcome) -> link_pb2.LinkWelcome:
    pool = welcome.pool
    return link_pb2.LinkWelcome(
        worker_id=welcome.worker_id,
        incarnation=welcome.incarnation,
        layouts=[layout_to_proto(welcome.layout)],
        transport=welcome.transport,
        pool=link_pb2.PoolDescriptor(
            base=pool.base,
            block_bytes=pool.block_bytes,
            num_blocks=pool.num_blocks,
            device=pool.device,
            device_id=pool.device_id,
        ),
        transport_metadata=welcome.transport_metadata,
        lease_s=welcome.lease_s,
    )


def _welcome_from_proto(proto: link_pb2.LinkWelcome, path: str) -> LinkWelcome:
    present(proto, "pool", path)
    layout = only_one(proto.layouts, f"{path}.layouts")
    return LinkWelcome(
        worker_id=WorkerId(text(proto.worker_id, f"{path}.worker_id")),
        incarnation=Incarnation(text(proto.incarnation, f"{path}.incarnation")),
        layout=layout_from_proto(layout, f"{path}.layouts[0]"),
        transport=text(proto.transport, f"{path}.transport"),
        pool=PoolDescriptor(
            base=proto.pool.base,
            block_bytes=at_least(proto.pool.block_bytes, 1, f"{path}.pool.block_bytes"),
            num_blocks=at_least(proto.pool.num_blocks, 1, f"{path}.pool.num_blocks"),
            device=text(proto.pool.device, f"{path}.pool.device"),
            device_id=proto.pool.device_id,
        ),
        transport_metadata=proto.transport_metadata,
        lease_s=positive(proto.lease_s, f"{path}.lease_s"),
    )
