"""Worked figures: Llama 3 8B (131,072 bytes of KV a token, weights in bf16) on a card of 80 GB and 3.35 TB/s."""

from __future__ import annotations

import pytest

from kvrelay.sizing import (
    Fit,
    Hit,
    decode_step,
    handoff_bytes,
    mean_wasted_tokens,
    paged,
    pool_bytes,
    pool_tokens,
    preallocated,
    prefix_hit,
)

GB = 10**9
TOKEN_BYTES = 2 * 32 * 8 * 128 * 2
WEIGHT_BYTES = 2 * 8_030_261_248
POOL = pool_bytes(80 * GB, 0.9, WEIGHT_BYTES, 2 * GB)


def test_the_pool_of_a_card_of_80_gb_holds_411_525_tokens() -> None:
    assert TOKEN_BYTES == 131_072
    assert round(POOL / GB, 4) == 53.9395
    assert pool_tokens(POOL, TOKEN_BYTES) == 411_525


def test_weights_that_do_not_fit_leave_no_pool_rather_than_a_negative_one() -> None:
    assert pool_bytes(16 * GB, 0.9, WEIGHT_BYTES, 2 * GB) == 0


def test_preallocated_to_8_192_tokens_50_requests_fit_and_use_an_eighth() -> None:
    assert 8_192 * TOKEN_BYTES == 2**30
    fit = preallocated(POOL, TOKEN_BYTES, 8_192, 1_000)
    assert fit.num_requests == 50
    assert round(100 * (1 - fit.wasted), 1) == 12.2


def test_paged_408_of_them_fit_and_waste_7_5_tokens_each() -> None:
    assert mean_wasted_tokens(16) == 7.5
    fit = paged(POOL, TOKEN_BYTES, 16, 1_000)
    assert fit == Fit(408, 0.0075)
    assert round(fit.num_requests / preallocated(POOL, TOKEN_BYTES, 8_192, 1_000).num_requests, 1) == 8.2


@pytest.mark.parametrize(
    ("num_sequences", "gigabytes", "milliseconds", "tokens_per_s"),
    [(32, 20.25, 6.05, None), (50, 22.61, 6.75, 7_407), (128, 32.84, 9.80, None), (408, 69.54, 20.76, 19_655)],
)
def test_a_step_takes_at_least_the_time_to_read_weights_and_kv(
    num_sequences: int, gigabytes: float, milliseconds: float, tokens_per_s: int | None
) -> None:
    step = decode_step(
        num_sequences, 1_000, weight_bytes=WEIGHT_BYTES, token_bytes=TOKEN_BYTES, bytes_per_s=3.35 * 1000 * GB
    )
    assert round(step.bytes_read / GB, 2) == gigabytes
    assert round(step.seconds * 1000, 2) == milliseconds
    assert tokens_per_s is None or int(step.tokens_per_s + 0.5) == tokens_per_s


def test_eight_times_the_requests_are_2_7_times_the_tokens_in_3_1_times_the_time() -> None:
    few, many = (
        decode_step(n, 1_000, weight_bytes=WEIGHT_BYTES, token_bytes=TOKEN_BYTES, bytes_per_s=3.35e12)
        for n in (50, 408)
    )
    assert round(many.tokens_per_s / few.tokens_per_s, 1) == 2.7
    assert round(many.seconds / few.seconds, 1) == 3.1


def test_a_shared_prefix_of_2_010_tokens_hits_125_blocks_and_leaves_210_tokens() -> None:
    hit = prefix_hit(2_010, 2_210, 16)
    assert hit == Hit(num_blocks=125, cached_tokens=2_000, left_tokens=210)
    assert round(100 * hit.linear_work, 1) == 9.5


def test_a_prompt_cached_to_its_last_token_computes_one() -> None:
    assert prefix_hit(64, 64, 16) == Hit(num_blocks=4, cached_tokens=63, left_tokens=1)
    assert prefix_hit(15, 64, 16) == Hit(num_blocks=0, cached_tokens=0, left_tokens=64)


def test_the_hand_off_of_32_768_tokens_is_4_29_gb() -> None:
    moved = handoff_bytes(32_768, 16, TOKEN_BYTES)
    assert moved == 2_048 * 2 * 2**20
    assert round(moved / GB, 2) == 4.29
    assert round(1000 * moved / (50 * GB)) == 86
    assert round(1000 * moved / (350 * GB)) == 12
    assert handoff_bytes(17, 16, TOKEN_BYTES) == 2 * 16 * TOKEN_BYTES
