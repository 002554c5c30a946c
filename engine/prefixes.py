"""What of a sequence is cached already, and what it adds to the cache. Knows sequences, no queues and no budgets.

Matched is the longest prefix of full blocks whose content is cached; published is each block as it becomes full. A
prompt that is cached to its last token still computes that one, into a copy of its last block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.block_pool import BlockPool
from engine.prefix_cache import Entry
from engine.sequence import SequenceState
from kvrelay.blocks import BlockKey, KeyChain, KeyScope
from kvrelay.requests import SequenceSpec


@dataclass(frozen=True, slots=True)
class Prefix:
    """Keys of the full blocks of a sequence's tokens, made once: they take a while. chain: goes on behind them."""

    keys: tuple[BlockKey, ...]
    chain: KeyChain


class Prefixes:
    """fingerprint: of the model, a part of every key. A pool without a cache matches and publishes nothing."""

    def __init__(self, pool: BlockPool, block_size: int, fingerprint: str) -> None:
        self._pool = pool
        self._block_size = block_size
        self._fingerprint = fingerprint

    def of(self, spec: SequenceSpec) -> Prefix | None:
        """None when it may neither use nor fill the cache."""
        if self._pool.cache is None or not spec.prefix_cache:
            return None
        scope = KeyScope(spec.tenant, self._fingerprint, cache_salt=spec.cache_salt)
        chain = KeyChain(scope, self._block_size)
        return Prefix(tuple(chain.extend(spec.token_ids)), chain)

    def find(self, prefix: Prefix, token_ids: tuple[int, ...]) -> list[Entry]:
        """The cached prefix of tokens that have these keys."""
        assert self._pool.cache is not None
        return self._pool.cache.match(prefix.keys, token_ids, self._block_size)

    def match(self, seq: SequenceState) -> list[Entry]:
        """The cached prefix of what a sequence that owns no blocks knows; [] if it may use none."""
        cache = self._pool.cache
        if cache is None or seq.chain is None:
            return []
        self._extend_keys(seq, len(seq.known) // self._block_size)
        return cache.match(seq.keys, seq.known, self._block_size)

    def publish(self, seq: SequenceState) -> None:
        """Give the blocks that became full their keys. A parent that was evicted meanwhile is published again first."""
        if seq.chain is None:
            return
        full = seq.num_computed // self._block_size
        if seq.num_published >= full:
            return
        if seq.parent is not None and seq.parent.block_id is None:
            seq.num_published, seq.parent = 0, None
        self._publish_up_to(seq, full)

    def _publish_up_to(self, seq: SequenceState, full: int) -> None:
        self._extend_keys(seq, full)
        span = range(seq.num_published, full)
        seq.parent = self._publish_blocks(span, seq.keys, seq.known, seq.block_ids, seq.parent)
        seq.num_published = full

    def refresh(self, seq: SequenceState) -> None:
        """Before it gives its blocks back: if one that its own hang on was evicted, and is still in a block of its own
        without a key, publish all anew. What hangs on nothing would be kept and never found."""
        entry = seq.parent
        while entry is not None and entry.block_id is not None:
            entry = entry.parent
        if entry is not None and seq.num_published <= len(seq.block_ids):
            full, seq.num_published, seq.parent = seq.num_published, 0, None
            self._publish_up_to(seq, full)

    def publish_table(self, prefix: Prefix, token_ids: tuple[int, ...], block_ids: tuple[int, ...]) -> Entry | None:
        """As publish, for blocks that came from elsewhere: block_ids[i] holds the i-th full block of these tokens.

        Returns the entry of the last one.
        """
        return self._publish_blocks(range(len(prefix.keys)), prefix.keys, token_ids, block_ids, None)

    def _publish_blocks(
        self,
        span: range,
        keys: Sequence[BlockKey],
        token_ids: Sequence[int],
        block_ids: Sequence[int],
        parent: Entry | None,
    ) -> Entry | None:
        """Blocks of these positions, the first of which follows `parent`. Returns the entry of the last one."""
        size = self._block_size
        for i in span:
            parent = self._pool.publish(block_ids[i], keys[i], token_ids[i * size : (i + 1) * size], parent)
        return parent

    def _extend_keys(self, seq: SequenceState, full: int) -> None:
        have = len(seq.keys)
        if have < full:
            assert seq.chain is not None
            seq.keys += seq.chain.extend(seq.known[have * self._block_size : full * self._block_size])
