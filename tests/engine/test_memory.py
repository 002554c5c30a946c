"""Pool memory: exact bounds, no copies, and addresses beyond 4 GiB."""

from __future__ import annotations

import ctypes
import hashlib

import pytest

from engine.memory import HostPool
from kvrelay.blocks import KVLayout
from kvrelay.errors import InvalidArgument

SMALL = KVLayout(kv_heads=1, layers=1, block_size=4, head_dim=8, dtype="uint8")
MIB_2 = KVLayout(kv_heads=8, layers=32, block_size=16, head_dim=128, dtype="bfloat16")


def test_a_fresh_pool_is_zero_and_read_shows_later_writes_without_a_copy() -> None:
    pool = HostPool(SMALL, 3)
    assert (pool.block_bytes, pool.num_blocks, pool.nbytes) == (64, 3, 192)
    block = pool.read(1)
    assert bytes(block) == bytes(64)
    pool.write(1, 60, b"abcd")
    assert bytes(block) == bytes(60) + b"abcd"
    assert bytes(pool.read(0)) == bytes(pool.read(2)) == bytes(64)
    with pytest.raises(TypeError):
        block[0] = 1
    pool.close()


def test_base_is_the_address_of_block_0() -> None:
    pool = HostPool(SMALL, 3)
    ctypes.memmove(pool.base + 2 * pool.block_bytes, b"xyz", 3)
    assert bytes(pool.read(2)[:4]) == b"xyz\0"
    assert bytes(pool.buffer[128:131]) == b"xyz"
    pool.close()


@pytest.mark.parametrize("block_id", [-1, 3, 1 << 32])
def test_a_block_outside_the_pool_is_refused(block_id: int) -> None:
    pool = HostPool(SMALL, 3)
    for access in (lambda: pool.read(block_id), lambda: pool.write(block_id, 0, b"")):
        with pytest.raises(ValueError, match=f"block_id {block_id} is not in a pool of 3 blocks"):
            access()
    pool.close()


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 1), (0, 65), (64, 1), (1 << 32, 4)])
def test_a_write_across_the_end_of_a_block_is_refused(offset: int, nbytes: int) -> None:
    pool = HostPool(SMALL, 3)
    with pytest.raises(ValueError, match="are not inside a block of 64 bytes"):
        pool.write(0, offset, bytes(nbytes))
    assert bytes(pool.buffer) == bytes(192)
    pool.close()


def test_a_view_of_wide_elements_counts_its_bytes() -> None:
    pool = HostPool(SMALL, 2)
    wide = memoryview(bytes(range(64))).cast("I")
    pool.write(1, 0, wide.cast("B"))
    with pytest.raises(ValueError, match=r"bytes 4 \.\. 68"):
        pool.write(1, 4, wide)
    assert bytes(pool.read(1)) == bytes(range(64))
    pool.close()


def test_a_closed_pool_says_so_and_closing_twice_is_fine() -> None:
    pool = HostPool(SMALL, 3)
    block = pool.read(0)
    pool.close()
    pool.close()
    with pytest.raises(ValueError, match="the pool is closed"):
        pool.read(0)
    assert bytes(block) == bytes(64), "a view keeps the memory it shows"


def test_blocks_beyond_4_gib_do_not_wrap() -> None:
    assert MIB_2.block_bytes == 2 << 20
    pool = HostPool(MIB_2, 2560)
    assert pool.nbytes == 5 << 30
    sides = [1023, 1024, 2047, 2048, 2559]  # both sides of 2^31 and 2^32, and the last
    for block_id in sides:
        pool.write(block_id, 0, block_id.to_bytes(2, "little") * (1 << 20))
    for block_id in sides:
        want = block_id.to_bytes(2, "little") * (1 << 20)
        assert hashlib.blake2b(pool.read(block_id)).digest() == hashlib.blake2b(want).digest()
        assert ctypes.string_at(pool.base + block_id * pool.block_bytes, 2) == want[:2]
    assert not any(pool.read(0)[:4096])
    assert MIB_2.offset(2048) == 1 << 32
    pool.close()


@pytest.mark.parametrize("num_blocks", [1 << 42, 1 << 62])
def test_a_pool_larger_than_any_memory_is_refused_in_one_line(num_blocks: int) -> None:
    with pytest.raises(InvalidArgument, match=rf"^no memory for {num_blocks} blocks of 2097152 bytes, \d+\.\d\d GB: "):
        HostPool(MIB_2, num_blocks)
