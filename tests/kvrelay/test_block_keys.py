"""Keys of full blocks: whatever changes a block's KV changes its key, and those of all blocks after it."""

from __future__ import annotations

import random
from dataclasses import fields, replace

import pytest

from kvrelay.blocks import KeyChain, KeyScope, block_keys

SIZE = 4
SCOPE = KeyScope(tenant="t", model_fingerprint="f", adapter="a", cache_salt="s", layer_group=1)
TOKENS = tuple(range(6 * SIZE))


@pytest.mark.parametrize("name", [field.name for field in fields(KeyScope)])
def test_any_other_scope_changes_every_key(name: str) -> None:
    draw = random.Random(name)
    own = block_keys(SCOPE, TOKENS, SIZE)
    for _ in range(200):
        old = getattr(SCOPE, name)
        new = draw.randrange(2, 1000) if isinstance(old, int) else old + chr(draw.randrange(0x10000) % 0xD800)
        assert not set(own) & set(block_keys(replace(SCOPE, **{name: new}), TOKENS, SIZE))


def test_a_part_moved_to_the_next_field_of_the_scope_changes_every_key() -> None:
    scopes = [
        KeyScope("org_1", "2345"),
        KeyScope("org_12345", ""),
        KeyScope("", "org_12345"),
        KeyScope("org_1", "", "2345"),
        KeyScope("org_1", "", "", "2345"),
        KeyScope("org_1", "234", layer_group=5),
    ]
    keys = [key for scope in scopes for key in block_keys(scope, TOKENS, SIZE)]
    assert len(set(keys)) == 6 * len(scopes)


@pytest.mark.parametrize("at", range(len(TOKENS)))
def test_any_other_token_changes_the_key_of_its_block_and_of_all_later_ones_only(at: int) -> None:
    own = block_keys(SCOPE, TOKENS, SIZE)
    other = block_keys(SCOPE, (*TOKENS[:at], 999, *TOKENS[at + 1 :]), SIZE)
    assert own[: at // SIZE] == other[: at // SIZE]
    assert not set(own[at // SIZE :]) & set(other)


def test_the_same_tokens_at_another_place_have_another_key() -> None:
    keys = block_keys(SCOPE, (1, 2, 3, 4) * 3, SIZE)
    assert len(set(keys)) == 3
    assert all(len(key.digest) == 32 for key in keys)


def test_only_full_blocks_have_keys() -> None:
    assert [len(block_keys(SCOPE, TOKENS[:n], SIZE)) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


def test_a_chain_that_is_extended_block_by_block_gives_the_keys_made_at_once() -> None:
    chain = KeyChain(SCOPE, SIZE)
    assert tuple(chain.extend(TOKENS[:8]) + chain.extend(TOKENS[8:12]) + chain.extend(TOKENS[12:])) == block_keys(
        SCOPE, TOKENS, SIZE
    )


def test_a_copied_chain_goes_on_alone() -> None:
    chain = KeyChain(SCOPE, SIZE)
    chain.extend(TOKENS[:8])
    other = chain.copy()
    assert other.extend((9, 9, 9, 9)) != chain.extend(TOKENS[8:12])
    assert chain.extend(TOKENS[12:]) == list(block_keys(SCOPE, TOKENS, SIZE)[3:])


def test_keys_of_the_largest_token_ids_are_made() -> None:
    assert len(block_keys(SCOPE, (2**32 - 1,) * SIZE, SIZE)) == 1
