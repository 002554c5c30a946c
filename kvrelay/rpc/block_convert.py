"""What workers tell of their caches <-> protos: events in reports, and whole lists. Knows no session and no call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvrelay.blocks import BlockEventKind, BlockEvents, BlockKey, BlockList, BlockRun
from kvrelay.errors import InvalidArgument
from kvrelay.rpc.fields import at_least, enum_of
from kvrelay.v1 import worker_pb2

KEY_BYTES = 32
KEYS_A_MESSAGE = 4096
"""128 KiB of them: well under the size of a frame."""
KINDS: dict[int, BlockEventKind] = {
    worker_pb2.BLOCK_EVENT_KIND_STORED: BlockEventKind.STORED,
    worker_pb2.BLOCK_EVENT_KIND_EVICTED: BlockEventKind.EVICTED,
    worker_pb2.BLOCK_EVENT_KIND_CLEARED: BlockEventKind.CLEARED,
}
NUMBERS = {kind: number for number, kind in KINDS.items()}


def events_to_proto(events: BlockEvents) -> worker_pb2.BlockEvents:
    """The caller keeps an item under a frame: at most KEYS_A_MESSAGE keys in it."""
    proto = worker_pb2.BlockEvents(first=events.first)
    for run in events.runs:
        proto.runs.add(kind=NUMBERS[run.kind], keys=_join(run.keys))
    return proto


def events_from_proto(proto: worker_pb2.BlockEvents, path: str) -> BlockEvents:
    """InvalidArgument names what is wrong."""
    runs = tuple(_run_from_proto(run, f"{path}.runs[{i}]") for i, run in enumerate(proto.runs))
    return BlockEvents(at_least(proto.first, 1, f"{path}.first"), runs)


def list_to_protos(blocks: BlockList) -> Iterator[worker_pb2.BlockList]:
    """At least one message, so that `next` is told."""
    for start in range(0, max(1, len(blocks.keys)), KEYS_A_MESSAGE):
        yield worker_pb2.BlockList(next=blocks.next, keys=_join(blocks.keys[start : start + KEYS_A_MESSAGE]))


def list_from_protos(protos: Iterable[worker_pb2.BlockList]) -> BlockList:
    """The messages of one answer, in order. InvalidArgument names what is wrong, also when there are none."""
    keys: list[BlockKey] = []
    following = 0
    for proto in protos:
        following = at_least(proto.next, 1, "blocks.next")
        keys += _split(proto.keys, "blocks.keys")
    return BlockList(at_least(following, 1, "blocks.next"), tuple(keys))


def _run_from_proto(proto: worker_pb2.BlockRun, path: str) -> BlockRun:
    kind = enum_of(proto.kind, KINDS, f"{path}.kind")
    keys = _split(proto.keys, f"{path}.keys")
    if bool(keys) is (kind is BlockEventKind.CLEARED):
        raise InvalidArgument(f"{path}.keys: {len(keys)} keys for {kind}", field=f"{path}.keys")
    return BlockRun(kind, keys)


def _join(keys: Iterable[BlockKey]) -> bytes:
    return b"".join(key.digest for key in keys)


def _split(raw: bytes, path: str) -> tuple[BlockKey, ...]:
    if len(raw) % KEY_BYTES:
        raise InvalidArgument(f"{path} has {len(raw)} bytes, not a multiple of {KEY_BYTES}", field=path)
    return tuple([BlockKey(raw[at : at + KEY_BYTES]) for at in range(0, len(raw), KEY_BYTES)])
