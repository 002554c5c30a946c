"""Known faults of paged memory: cached content that is not what its key says, shared blocks that are written to."""

from __future__ import annotations

from known_fault import Fault, one_edit

ROOM, PREFIXES, CACHE, POOL = "engine/room.py", "engine/prefixes.py", "engine/prefix_cache.py", "engine/block_pool.py"

MEMORY_FAULTS: tuple[Fault, ...] = (
    one_edit(
        "publish-before-landed",
        "the blocks of a ticket are known by their keys as soon as they are reserved, before anybody wrote to them",
        "decode_svc/core.py",
        """        attempt.ticket = Ticket(self._p.incarnation, self._epoch, table, len(held))
""",
        """        attempt.ticket = Ticket(self._p.incarnation, self._epoch, table, len(held))
        if attempt.prefix is not None and self._p.pool.cache is not None:
            parent = None
            size = layout.block_size
            for i, key in enumerate(attempt.prefix.keys):
                tokens = attempt.work.token_ids[i * size : (i + 1) * size]
                parent, _ = self._p.pool.cache.publish(table.block_ids[i], key, tokens, parent)
""",
    ),
    one_edit(
        "publish-one-block-early",
        "a block gets its key when its first tokens are computed",
        PREFIXES,
        """        full = seq.num_computed // self._block_size
        if seq.num_published >= full:
""",
        """        full = min(-(-seq.num_computed // self._block_size), len(seq.known) // self._block_size)
        if seq.num_published >= full:
""",
    ),
    one_edit(
        "write-to-shared-tail",
        "sequences of one request write to the block that they share",
        ROOM,
        "            if not self._pool.is_writable(source, self._sources[source]):",
        "            if False:",
    ),
    one_edit(
        "shared-tail-not-marked",
        "a fork does not know that its last block belongs to others too",
        "engine/sequence.py",
        "        other.shared_tail = self.shared_tail = True",
        "        other.shared_tail = self.shared_tail = False",
    ),
    one_edit(
        "emptied-blocks-free-at-once",
        "blocks that are being swapped out are free before the step that reads them has run",
        ROOM,
        """                self._emptied.append(block_id)
                del self._leaving[block_id]
""",
        """                self._pool.release([block_id])
                del self._leaving[block_id]
""",
    ),
    one_edit(
        "evicted-block-keeps-its-key",
        "a block that is used for something else is still found by the key of what it held",
        POOL,
        """        block_id, _ = self._unused.popitem(last=False)
        self.cache.drop(block_id)
""",
        """        block_id, _ = self._unused.popitem(last=False)
""",
    ),
    one_edit(
        "emptied-block-keeps-its-key",
        "a block taken from a swapped sequence is still found by the key of what it held",
        ROOM,
        """        self._pool.disown(emptied)
""",
        "",
    ),
    one_edit(
        "salt-left-out",
        "requests with different cache salts share blocks",
        PREFIXES,
        "        scope = KeyScope(spec.tenant, self._fingerprint, cache_salt=spec.cache_salt)",
        "        scope = KeyScope(spec.tenant, self._fingerprint)",
    ),
    one_edit(
        "prefix-not-dropped",
        "an aborted ticket keeps the cached blocks that it held",
        "decode_svc/core.py",
        """                self._p.pool.release(action.block_ids)
""",
        """                pass
""",
    ),
    one_edit(
        "prefix-pushed-again",
        "prefill pushes from the first block on, whatever decode has cached",
        "prefill_svc/core.py",
        "            attempt.num_pushed = ticket.num_cached_blocks",
        "            attempt.num_pushed = 0",
    ),
)
