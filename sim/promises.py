"""What the key of a block promises: the bytes that the hash executor's rule gives for its tokens. Knows no pools.

The rule is written here a second time, from tokens alone and without a pool, so that nothing a pool got wrong can
make it agree.
"""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass

from engine.hash_executor import HEAD_DIM
from engine.prefix_cache import Entry


@dataclass(frozen=True, slots=True)
class _Content:
    """One full block in its place. before: hash state of all blocks up to and with it; end: tokens up to its end."""

    data: bytes
    before: hashlib.blake2b
    end: int


ROOT = _Content(b"", hashlib.blake2b(digest_size=32), 0)


class Promises:
    """Contents by the digests of keys, each worked out once."""

    def __init__(self) -> None:
        self._known: dict[bytes, _Content] = {}

    def broken(self, entry: Entry, data: memoryview) -> str:
        """Empty if these are the bytes of that entry's block, under the right key; else what is wrong."""
        parent = entry.parent
        if parent is not None:
            digest = hashlib.blake2b(parent.key.digest + entry.tokens, digest_size=32).digest()
            if digest != entry.key.digest:
                return "its key is not that of its tokens behind its parent"
        content = self._known.get(entry.key.digest)
        if content is None:
            before = ROOT if parent is None else self._known[parent.key.digest]
            content = self._known[entry.key.digest] = _content(array("I", entry.tokens), before)
        return "" if data == content.data else "its bytes are not those of its tokens"


def _content(token_ids: array[int], before: _Content) -> _Content:
    ks, vs = b"", b""
    for position, token_id in enumerate(token_ids, before.end):
        prefix = before.before.copy()
        prefix.update(ks + vs)
        row = hashlib.blake2b(prefix.digest(), digest_size=2 * HEAD_DIM)
        row.update(b"%d at %d" % (token_id, position))
        ks, vs = ks + row.digest()[:HEAD_DIM], vs + row.digest()[HEAD_DIM:]
    after = before.before.copy()
    after.update(ks + vs)
    return _Content(ks + vs, after, before.end + len(token_ids))
