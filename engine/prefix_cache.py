"""Which full blocks of one pool hold which content, by key. Knows neither states of blocks nor sequences.

An entry is the content of one block in its place: its tokens and the entry before it. Both are compared on a hit, so
that a key which two contents share (a broken hash) costs a miss and never a wrong block.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from kvrelay.blocks import BlockEventKind, BlockKey, BlockRun


class Entry:
    """The content of one full block. block_id None: not cached any more, and never again."""

    __slots__ = ("block_id", "key", "parent", "tokens")

    def __init__(self, key: BlockKey, tokens: bytes, parent: Entry | None, block_id: int) -> None:
        self.key = key
        self.tokens = tokens
        self.parent = parent
        self.block_id: int | None = block_id


class PrefixCache:
    """Entries by key and by block, one to one, and what happened to them since somebody last asked. O(1) an entry."""

    def __init__(self) -> None:
        self._by_key: dict[bytes, Entry] = {}
        self._by_block: dict[int, Entry] = {}
        self._events: list[tuple[BlockEventKind, BlockKey]] = []
        self._cleared = False
        self.version = 0
        """Another one after every change: what was not found at one version is not there at that version."""

    def __len__(self) -> int:
        return len(self._by_key)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._by_block

    def entry_of(self, block_id: int) -> Entry | None:
        return self._by_block.get(block_id)

    def match(self, keys: Sequence[BlockKey], token_ids: Sequence[int], block_size: int) -> list[Entry]:
        """Entries of the longest prefix of these full blocks that is cached. keys[i]: of tokens i * block_size on."""
        if not keys or keys[0].digest not in self._by_key:
            return []
        found: list[Entry] = []
        parent: Entry | None = None
        raw = array("I", token_ids[: len(keys) * block_size]).tobytes()
        size = block_size * array("I").itemsize
        for i, key in enumerate(keys):
            entry = self._by_key.get(key.digest)
            if entry is None or entry.parent is not parent or entry.tokens != raw[i * size : (i + 1) * size]:
                break
            found.append(entry)
            parent = entry
        return found

    def publish(
        self, block_id: int, key: BlockKey, token_ids: Sequence[int], parent: Entry | None
    ) -> tuple[Entry, int | None]:
        """The entry of this content, and a block that has lost its own: insert if absent.

        block_id stays without a key if another block holds the same content; it may not have another key already.
        An entry under this key that is another content, or hangs on a parent that is gone, gives way.
        """
        tokens = array("I", token_ids).tobytes()
        there = self._by_key.get(key.digest)
        if there is not None and there.parent is parent and there.tokens == tokens:
            return there, None
        lost = None if there is None else there.block_id
        if there is not None:
            self._forget(there)
        own = self._by_block.get(block_id)
        if own is not None:  # its parent was recomputed elsewhere meanwhile: the same content on a new parent
            self._forget(own)
        entry = Entry(key, tokens, parent, block_id)
        self._by_key[key.digest] = entry
        self._by_block[block_id] = entry
        self.version += 1
        self._events.append((BlockEventKind.STORED, key))
        return entry, None if lost == block_id else lost

    def drop(self, block_id: int) -> None:
        """The block is used for something else. Nothing happens if it has no entry."""
        entry = self._by_block.get(block_id)
        if entry is not None:
            self._forget(entry)

    def clear(self) -> None:
        for entry in self._by_block.values():
            entry.block_id = entry.parent = None
        self._by_key.clear()
        self._by_block.clear()
        self._events.clear()
        self._cleared = True
        self.version += 1

    def keys(self) -> tuple[BlockKey, ...]:
        """Of everything cached now."""
        return tuple([entry.key for entry in self._by_key.values()])

    def take_events(self) -> tuple[BlockRun, ...]:
        """What happened since the last call, in order."""
        events, self._events = self._events, []
        runs = [BlockRun(BlockEventKind.CLEARED)] if self._cleared else []
        self._cleared = False
        return (*runs, *_runs_of(events))

    def check_integrity(self) -> None:
        """AssertionError unless both views say the same."""
        assert len(self._by_key) == len(self._by_block), "entries by key and by block differ in number"
        for block_id, entry in self._by_block.items():
            assert entry.block_id == block_id, f"entry of block {block_id} names block {entry.block_id}"
            assert self._by_key.get(entry.key.digest) is entry, f"block {block_id} is not found by its key"

    def _forget(self, entry: Entry) -> None:
        assert entry.block_id is not None
        del self._by_key[entry.key.digest]
        del self._by_block[entry.block_id]
        entry.block_id = entry.parent = None
        self.version += 1
        self._events.append((BlockEventKind.EVICTED, entry.key))


def _runs_of(events: Iterable[tuple[BlockEventKind, BlockKey]]) -> list[BlockRun]:
    runs: list[tuple[BlockEventKind, list[BlockKey]]] = []
    for kind, key in events:
        if not runs or runs[-1][0] is not kind:
            runs.append((kind, []))
        runs[-1][1].append(key)
    return [BlockRun(kind, tuple(keys)) for kind, keys in runs]
