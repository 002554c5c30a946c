"""The small message that says what a part wrote, and its msgpack form. Knows no tickets: the receiver judges it.

decode() trusts nothing: it bounds what it allocates and names the field that is wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import msgpack

from kvrelay.errors import InvalidArgument
from kvrelay.requests import Incarnation

FORMAT_VERSION = 1
MAX_POSITIONS = 1 << 16
MAX_INCARNATION_CHARS = 256
MAX_MANIFEST_BYTES = 2 << 20
_MAX_INDEX = (1 << 31) - 1
_MAX_EPOCH = (1 << 63) - 1
_MAX_CHECKSUM = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class Manifest:
    """Part `part` of ticket `epoch`: block_ids[i] of `incarnation`'s pool now holds logical block positions[i].

    writer: the prefill incarnation. checksums: CRC-32 per block, or empty.
    """

    epoch: int
    incarnation: Incarnation
    writer: Incarnation
    part: int
    positions: tuple[int, ...]
    block_ids: tuple[int, ...]
    last_part: bool
    checksums: tuple[int, ...] = ()


def encode(m: Manifest) -> bytes:
    """One msgpack array: [version, epoch, incarnation, writer, part, positions, block_ids, last_part, checksums]."""
    fields = (FORMAT_VERSION, m.epoch, m.incarnation, m.writer, m.part, m.positions, m.block_ids, m.last_part)
    raw: bytes = msgpack.packb([*fields, m.checksums], use_bin_type=True)
    return raw


def decode(raw: bytes) -> Manifest:
    """The manifest in `raw`. Raises InvalidArgument naming the field; allocates a small multiple of raw at most."""
    fields = _unpack(raw)
    if not isinstance(fields, list) or len(fields) != 9:
        _refuse("manifest", "is not an array of 9 fields")
    version, epoch, incarnation, writer, part, positions, block_ids, last_part, checksums = fields
    if type(version) is not int or version != FORMAT_VERSION:
        _refuse("manifest.version", f"is not {FORMAT_VERSION}")
    if type(last_part) is not bool:
        _refuse("manifest.last_part", "is not a boolean")
    where = _numbers(positions, "positions", _MAX_INDEX)
    if not where:
        _refuse("manifest.positions", "is empty")
    if len(set(where)) != len(where):
        _refuse("manifest.positions", "names a position twice")
    ids = _numbers(block_ids, "block_ids", _MAX_INDEX)
    if len(ids) != len(where):
        _refuse("manifest.block_ids", f"has {len(ids)} entries for {len(where)} positions")
    sums = _numbers(checksums, "checksums", _MAX_CHECKSUM)
    if sums and len(sums) != len(where):
        _refuse("manifest.checksums", f"has {len(sums)} entries for {len(where)} positions")
    return Manifest(
        epoch=_number(epoch, "epoch", _MAX_EPOCH),
        incarnation=_incarnation(incarnation, "incarnation"),
        writer=_incarnation(writer, "writer"),
        part=_number(part, "part", _MAX_INDEX),
        positions=where,
        block_ids=ids,
        last_part=last_part,
        checksums=sums,
    )


def _unpack(raw: bytes) -> object:
    if len(raw) > MAX_MANIFEST_BYTES:
        _refuse("manifest", f"has {len(raw)} bytes, more than {MAX_MANIFEST_BYTES}")
    try:
        fields: object = msgpack.unpackb(
            raw,
            raw=False,
            strict_map_key=True,
            use_list=True,
            max_str_len=MAX_INCARNATION_CHARS * 4,
            max_bin_len=0,
            max_ext_len=0,
            max_map_len=0,
            max_array_len=MAX_POSITIONS,
        )
    except Exception as error:  # whatever a parser of hostile bytes raises (RecursionError too) is a bad manifest
        raise InvalidArgument(f"manifest is not msgpack: {type(error).__name__}", field="manifest") from None
    return fields


def _number(value: object, name: str, limit: int) -> int:
    if type(value) is not int or not 0 <= value <= limit:
        _refuse(f"manifest.{name}", f"is not an integer of 0..{limit}")
    return value


def _numbers(value: object, name: str, limit: int) -> tuple[int, ...]:
    if not isinstance(value, list):
        _refuse(f"manifest.{name}", "is not an array")
    return tuple(_number(entry, name, limit) for entry in value)


def _incarnation(value: object, name: str) -> Incarnation:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_INCARNATION_CHARS:
        _refuse(f"manifest.{name}", f"is not a string of 1..{MAX_INCARNATION_CHARS} characters")
    return Incarnation(value)


def _refuse(field: str, what: str) -> NoReturn:
    raise InvalidArgument(f"{field} {what}", field=field)
