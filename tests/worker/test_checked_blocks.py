"""Blocks with checksums: one wrong byte is an error of the attempt, never a wrong token."""

from __future__ import annotations

import pytest
from support.pair import Pair
from support.pair_requests import hash_reference, make_work


@pytest.fixture(params=["nixl", "grpc"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def flipped(data: bytes) -> bytes:
    """One bit in the middle is another one."""
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


def counters(pair: Pair) -> dict[str, int]:
    return dict(pair.decode.load(pair.now).counters)


def test_checked_blocks_give_the_tokens_of_one_process(transport: str) -> None:
    pair = Pair(transport=transport, verify_kv=True, seed=4)
    requests = [pair.submit(make_work(f"r{i}", n, 20)) for i, n in enumerate((1, 16, 17, 300))]
    pair.run()
    assert [tuple(r.tokens) for r in requests] == [hash_reference(r.work) for r in requests]
    assert "bad_checksum" not in counters(pair)
    pair.close()


def test_a_flipped_bit_ends_the_attempt_before_decode_emits_anything(transport: str) -> None:
    pair = Pair(transport=transport, verify_kv=True)
    pair.damage = flipped
    request = pair.submit(make_work("a", 100, 20))
    pair.run()
    assert counters(pair)["bad_checksum"] == 1
    assert request.ended is not None
    assert (request.ended.reason, request.ended.code) == ("failed", "Unavailable")
    assert request.tokens in ([], [hash_reference(request.work)[0]]), "token 0 is prefill's own"
    assert pair.decode_steps == 0
    pair.damage = lambda data: data
    again = pair.submit(make_work("b", 100, 20))
    pair.run()
    assert tuple(again.tokens) == hash_reference(again.work)
    pair.close()


def test_unchecked_a_flipped_bit_changes_the_tokens(transport: str) -> None:
    """The control: the damage is real, and nothing but the checksum sees it."""
    pair = Pair(transport=transport)
    pair.damage = flipped
    request = pair.submit(make_work("a", 100, 20))
    pair.run()
    assert len(request.tokens) == 20
    assert tuple(request.tokens) != hash_reference(request.work)
    pair.close()
