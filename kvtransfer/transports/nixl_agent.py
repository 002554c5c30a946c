"""The NIXL agent of a process with its one registered pool. Knows neither threads nor events: one thread may use it.

NIXL's own descriptor lists are pickled; peers exchange a PoolDescriptor instead and both ends build their lists.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from kvrelay.errors import FailedPrecondition, LayoutMismatch, NotFound
from kvrelay.link import PoolDescriptor
from kvrelay.requests import Incarnation
from kvtransfer.store import BlockStore
from kvtransfer.transports.base import Part

MAX_METADATA_BYTES = 1 << 20
MEMORY_KIND = {"cpu": "DRAM", "cuda": "VRAM"}
QUIET = {"UCX_LOG_LEVEL": "fatal", "NIXL_LOG_LEVEL": "FATAL"}
"""Both libraries write to standard error; what goes wrong comes back as exceptions anyway. A set variable wins."""


@dataclass(frozen=True, slots=True)
class Peer:
    pool: PoolDescriptor
    blocks: Any
    """NIXL's prepared list of the peer's blocks."""


class PoolAgent:
    """Agent named with the incarnation, one pool, many peers. Raises NIXL's own exceptions where not said otherwise.

    No progress thread (it burns a core while idle) and no listener: something must call `state` or `notifications`
    for writes in either direction to move on.
    """

    def __init__(self, incarnation: Incarnation, store: BlockStore, device: str = "cpu", device_id: int = 0) -> None:
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)
        from nixl_cu12._api import nixl_agent, nixl_agent_config  # lazy: the other transports need no NIXL

        config = nixl_agent_config(
            enable_prog_thread=False, enable_listen_thread=False, capture_telemetry=False, backends=["UCX"]
        )
        self._agent = nixl_agent(incarnation, config)
        self._kind = MEMORY_KIND[device]
        self.pool = PoolDescriptor(store.base, store.block_bytes, store.num_blocks, device, device_id)
        region = (store.base, store.block_bytes * store.num_blocks, device_id, "")
        self._registered = self._agent.register_memory([region], self._kind)
        self._blocks = self._prepare_list("", self.pool)
        self._peers: dict[Incarnation, Peer] = {}
        self.metadata: bytes = self._agent.get_agent_metadata()

    @property
    def num_peers(self) -> int:
        return len(self._peers)

    def add_peer(self, incarnation: Incarnation, metadata: bytes, pool: PoolDescriptor) -> None:
        """Learn where a peer's pool lies. A known peer: nothing. Raises FailedPrecondition if it cannot be."""
        if incarnation in self._peers:
            return
        if pool.block_bytes != self.pool.block_bytes:
            raise LayoutMismatch(
                f"a block has {self.pool.block_bytes} bytes here, {pool.block_bytes} there", field="pool.block_bytes"
            )
        if not metadata or len(metadata) > MAX_METADATA_BYTES:
            raise FailedPrecondition(f"metadata of {len(metadata)} bytes", field="transport_metadata")
        name = ""
        try:
            loaded = self._agent.add_remote_agent(metadata)
            name = loaded.decode() if isinstance(loaded, bytes) else loaded
            if name != incarnation:
                raise FailedPrecondition(f"metadata is of agent {name!r}, not {incarnation!r}")
            self._peers[incarnation] = Peer(pool, self._prepare_list(incarnation, pool))
            self._agent.make_connection(incarnation)
        except Exception as error:
            if incarnation in self._peers:  # or it would be taken for known at the next try
                self.drop_peer(incarnation)
            elif name:
                self._agent.remove_remote_agent(name)
            raise FailedPrecondition(
                f"cannot reach the pool of {incarnation}: {error}", field="transport_metadata"
            ) from error

    def drop_peer(self, incarnation: Incarnation) -> None:
        """Forget a peer and disconnect. Unknown peers are ignored. Its writes must have been released."""
        peer = self._peers.pop(incarnation, None)
        if peer is not None:
            self._agent.release_dlist_handle(peer.blocks)
            self._agent.remove_remote_agent(incarnation)

    def prepare(self, part: Part) -> Any:
        """A handle for the write, nothing sent. Raises KVRelayError if the part names what is not there."""
        import numpy as np

        peer = self._peers.get(part.peer)
        if peer is None:
            raise NotFound(f"no peer {part.peer}")
        for what, ids, limit in (
            ("source_ids", part.source_ids, self.pool.num_blocks),
            ("dest_ids", part.dest_ids, peer.pool.num_blocks),
        ):
            if len(ids) != len(part.positions) or not all(0 <= i < limit for i in ids):
                raise FailedPrecondition(f"{what} must be {len(part.positions)} ids below {limit}", field=what)
        sources, dests = np.array(part.source_ids, dtype=np.int32), np.array(part.dest_ids, dtype=np.int32)
        return self._agent.make_prepped_xfer("WRITE", self._blocks, sources, peer.blocks, dests, part.manifest)

    def start(self, handle: Any) -> str:
        """Begin a prepared write: DONE, PROC or anything else, as `state`."""
        state: str = self._agent.transfer(handle)
        return state

    def state(self, handle: Any) -> str:
        """DONE: all bytes have arrived. PROC: not yet. Anything else, or an exception: it ended, not done."""
        state: str = self._agent.check_xfer_state(handle)
        return state

    def release(self, handle: Any) -> bool:
        """Give up a handle. False: data is still moving, handle and blocks must be kept."""
        try:
            self._agent.release_xfer_handle(handle)
        except Exception:  # NIXL's error classes share no base
            return False
        return True

    def notifications(self) -> list[tuple[Incarnation, bytes]]:
        """Messages that arrived with their data, by sender."""
        found = self._agent.get_new_notifs()
        return [(Incarnation(name), payload) for name, payloads in found.items() for payload in payloads]

    def close(self) -> None:
        for incarnation in list(self._peers):
            self.drop_peer(incarnation)
        self._agent.release_dlist_handle(self._blocks)
        self._agent.deregister_memory(self._registered)

    def _prepare_list(self, name: str, pool: PoolDescriptor) -> Any:
        import numpy as np

        row = [pool.base, pool.block_bytes, pool.device_id, pool.block_bytes, pool.num_blocks]
        return self._agent.prep_xfer_dlist(name, np.array([row], dtype=np.uint64), MEMORY_KIND[pool.device])
