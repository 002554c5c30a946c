"""Manifests survive their wire form, and hostile bytes are refused by the name of the field."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.errors import InvalidArgument
from kvrelay.requests import Incarnation
from kvtransfer.manifest import MAX_MANIFEST_BYTES, MAX_POSITIONS, Manifest, decode, encode

GOOD = Manifest(7, Incarnation("d"), Incarnation("p"), 2, (0, 1, 5), (10, 11, 12), True, (1, 2, 3))
FIELDS = [1, 7, "d", "p", 2, [0, 1, 5], [10, 11, 12], True, [1, 2, 3]]

index = st.integers(0, 2**31 - 1)
name = st.text(min_size=1, max_size=40).map(Incarnation)


def refusal(raw: bytes) -> str:
    """The field that decode names, or 'manifest' if it took the bytes; anything else it raises fails the test."""
    try:
        decode(raw)
    except InvalidArgument as error:
        return error.field
    return "manifest"


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    positions = tuple(draw(st.lists(index, min_size=1, max_size=30, unique=True)))
    n = len(positions)
    ids = tuple(draw(st.lists(index, min_size=n, max_size=n)))
    sums = tuple(draw(st.lists(st.integers(0, 2**32 - 1), min_size=n, max_size=n))) if draw(st.booleans()) else ()
    epoch, last = draw(st.integers(0, 2**63 - 1)), draw(st.booleans())
    return Manifest(epoch, draw(name), draw(name), draw(index), positions, ids, last, sums)


@given(manifests())
@settings(max_examples=200, deadline=None)
def test_decode_gives_back_what_encode_took(manifest: Manifest) -> None:
    assert decode(encode(manifest)) == manifest


@given(st.binary(max_size=300))
@settings(max_examples=500, deadline=None)
def test_any_bytes_are_a_manifest_or_invalid_argument(raw: bytes) -> None:
    assert refusal(raw).startswith("manifest")


@given(st.integers(0, 60), st.integers(0, 255))
@settings(max_examples=500, deadline=None)
def test_a_flipped_byte_never_raises_anything_else(at: int, value: int) -> None:
    raw = bytearray(encode(GOOD))
    raw[at % len(raw)] = value
    assert refusal(bytes(raw)).startswith("manifest")


@pytest.mark.parametrize(
    ("at", "value", "field"),
    [
        (0, 2, "manifest.version"),
        (0, True, "manifest.version"),
        (1, -1, "manifest.epoch"),
        (1, 2**63, "manifest.epoch"),
        (1, "7", "manifest.epoch"),
        (1, True, "manifest.epoch"),
        (1, 7.0, "manifest.epoch"),
        (2, "", "manifest.incarnation"),
        (2, 5, "manifest.incarnation"),
        (3, "x" * 257, "manifest.writer"),
        (3, None, "manifest.writer"),
        (4, -1, "manifest.part"),
        (5, [], "manifest.positions"),
        (5, [0, 1, 1], "manifest.positions"),
        (5, [0, 1, -5], "manifest.positions"),
        (5, [0, 1, 2**31], "manifest.positions"),
        (5, [0, 1, [5]], "manifest.positions"),
        (5, 3, "manifest.positions"),
        (6, [10, 11], "manifest.block_ids"),
        (6, [10, 11, 1.5], "manifest.block_ids"),
        (7, 1, "manifest.last_part"),
        (8, [1], "manifest.checksums"),
        (8, [1, 2, 2**32], "manifest.checksums"),
    ],
)
def test_a_wrong_field_is_named(at: int, value: object, field: str) -> None:
    fields = [*FIELDS[:at], value, *FIELDS[at + 1 :]]
    with pytest.raises(InvalidArgument) as caught:
        decode(msgpack.packb(fields))
    assert caught.value.field == field


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xc1",
        b"\xdd\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\xc9\xff\xff\xff\xff\x01",
        b"\x91" * 100_000,
        msgpack.packb(FIELDS) + b"\x00",
        msgpack.packb(FIELDS[:8]),
        msgpack.packb({"epoch": 1}),
        msgpack.packb(list(range(MAX_POSITIONS + 1))),
        b"\x00" * (MAX_MANIFEST_BYTES + 1),
    ],
)
def test_hostile_bytes_are_refused_and_allocate_little(raw: bytes) -> None:
    tracemalloc.start()
    with pytest.raises(InvalidArgument):
        decode(raw)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 << 20


def test_a_manifest_of_the_largest_part_passes() -> None:
    positions = tuple(range(MAX_POSITIONS))
    large = replace(GOOD, positions=positions, block_ids=positions, checksums=positions)
    assert decode(encode(large)) == large
