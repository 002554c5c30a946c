"""One-sided writes: memory that a peer may write to without asking, and a ledger that sees every wrong one.

A part's blocks are written one after another, each in two halves at their own times, into whatever lies there then.
The manifest and the writer's completion travel by themselves. What a dead process had on the wire may still land for
TAIL_S. The ledger knows which blocks may still be written to; the receiver's pool asks it before it gives one away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from engine.block_pool import BlockPool, BlockState
from engine.memory import HostPool
from engine.prefix_cache import Entry
from kvrelay.blocks import BlockKey
from kvrelay.errors import FailedPrecondition
from kvrelay.link import PoolDescriptor
from kvrelay.requests import Incarnation
from kvtransfer.transports.base import NotificationArrived, Part, TransportEvent, WriteDone, WriteFailed
from sim.promises import Promises
from sim.world import Node, Violation, World

TAIL_S = 0.3
"""A process that died writes nothing later than this after its death."""


@dataclass
class _Flight:
    """A part being written. landed: blocks whose bytes are all there."""

    writer: Member
    part: Part
    left: int
    landed: set[int] = field(default_factory=set)
    failed: bool = False


@dataclass
class Member:
    """One incarnation's memory. notify: how the transport tells its worker of an event."""

    incarnation: Incarnation
    node: Node
    store: HostPool
    notify: Callable[[TransportEvent], None]
    pool: LedgerPool | None = None
    expected: Callable[[int], set[int]] = lambda _: set()
    """Blocks that a ticket's writer must fill."""
    is_open: Callable[[int], bool] = lambda _: True
    """Whether a ticket may be written to."""
    writable: dict[int, int] = field(default_factory=dict)
    """Block -> how many writes to it have not ended."""
    complete: dict[int, set[int]] = field(default_factory=dict)
    """Epoch -> blocks whose bytes have all landed under it."""


class LedgerPool(BlockPool):
    """A block pool that refuses, as a violation, to free what may be written to, to read what has not landed, and to
    cache or hold under a key what is not the key's content."""

    def __init__(self, num_blocks: int, *, cache: bool = False) -> None:
        super().__init__(num_blocks, cache=cache)
        self.member: Member | None = None
        self.bytes_of: Callable[[int], memoryview] | None = None
        self.promises = Promises()

    def publish(self, block_id: int, key: BlockKey, token_ids: Sequence[int], parent: Entry | None) -> Entry | None:
        entry = super().publish(block_id, key, token_ids, parent)
        if entry is not None:
            self._check_content(entry, block_id)
        return entry

    def hold(self, entries: Iterable[Entry]) -> tuple[int, ...]:
        entries = list(entries)
        block_ids = super().hold(entries)
        for entry, block_id in zip(entries, block_ids, strict=True):
            self._check_content(entry, block_id)
        return block_ids

    def check_contents(self) -> None:
        """Everything that has a key."""
        for block_id in range(self.num_blocks):
            entry = self.cache.entry_of(block_id) if self.cache is not None else None
            if entry is not None:
                self._check_content(entry, block_id)

    def _check_content(self, entry: Entry, block_id: int) -> None:
        if self.bytes_of is not None and (what := self.promises.broken(entry, self.bytes_of(block_id))):
            raise Violation(f"block {block_id} has a key, and {what}")

    def hold_reserved(self, block_ids: tuple[int, ...], epoch: int) -> None:  # type: ignore[override]
        if self.member is not None:
            missing = self.member.expected(epoch) - self.member.complete.get(epoch, set())
            if missing:
                raise Violation(f"ticket {epoch} landed, but blocks {sorted(missing)} have not all their bytes")
        super().hold_reserved(block_ids, epoch)

    def free_reserved(self, block_ids: tuple[int, ...], epoch: int) -> None:  # type: ignore[override]
        if self.member is not None:
            live = [block for block in block_ids if self.member.writable.get(block)]
            if live:
                raise Violation(f"blocks {live} of ticket {epoch} are freed while they may be written to")
        super().free_reserved(block_ids, epoch)


@dataclass
class WriteFaults:
    """Chances per part, and how slow writes are."""

    fail: float = 0.0
    duplicate: float = 0.0
    late_notice: float = 0.0
    slow: float = 0.0
    refuse_post: float = 0.0
    flip: float = 0.0
    """A wrong byte in a block; only where it is looked for."""


class Fabric:
    """All memory that can be written to from afar."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.promises = Promises()
        self.faults = WriteFaults()
        self.counts: dict[str, int] = {}
        self._members: dict[Incarnation, Member] = {}
        self._flights: list[_Flight] = []
        self._posted: set[tuple[Incarnation, Incarnation, int, int]] = set()

    def join(self, member: Member) -> None:
        self._members[member.incarnation] = member

    def post(self, writer: Member, part: Part) -> None:
        """Begin to write. Raises FailedPrecondition if it is not begun."""
        rng = self.world.rng
        if part.peer not in self._members or rng.random() < self.faults.refuse_post:
            self._count("refused_post")
            raise FailedPrecondition(f"{part.peer} is not known")
        target = self._members[part.peer]
        self._check_post(writer, target, part)
        flight = _Flight(writer, part, len(part.dest_ids))
        self._flights.append(flight)
        for dest in part.dest_ids:
            target.writable[dest] = target.writable.get(dest, 0) + 1
        fails = rng.random() < self.faults.fail
        at = 0.0
        for i in range(len(part.dest_ids)):
            at += rng.uniform(0.5, 6.0) if rng.random() < self.faults.slow else rng.uniform(0.0001, 0.003)
            half = at + rng.uniform(0.0001, 0.002)
            self.world.after(at, lambda i=i: self._land(flight, i, 0))  # type: ignore[misc]
            self.world.after(half, lambda i=i: self._land(flight, i, 1))  # type: ignore[misc]
        if fails:
            self._count("failed_write")
            self.world.after(rng.uniform(0.0, at), lambda: self._fail(flight))

    def _check_post(self, writer: Member, target: Member, part: Part) -> None:
        if target.node.alive and not target.is_open(part.epoch):
            raise Violation(f"{writer.incarnation} begins to write to ticket {part.epoch}, which is not open")
        for position in part.positions:
            name = (writer.incarnation, part.peer, part.epoch, position)
            if name in self._posted:
                raise Violation(f"{writer.incarnation} posts position {position} of ticket {part.epoch} twice")
            self._posted.add(name)

    def _land(self, flight: _Flight, i: int, half: int) -> None:
        """Half a block arrives, whatever the block is used for by now."""
        if flight not in self._flights:
            return
        part, writer = flight.part, flight.writer
        target = self._members[part.peer]
        dest, source = part.dest_ids[i], part.source_ids[i]
        if target.node.alive:
            self._check(target, writer, part, dest, source)
            data = writer.store.read(source)
            middle = len(data) // 2
            piece = data[:middle] if half == 0 else data[middle:]
            if half == 1 and self.world.rng.random() < self.faults.flip:
                self._count("flipped")
                piece = memoryview(bytes([piece[0] ^ 1]) + bytes(piece[1:]))
            target.store.write(dest, 0 if half == 0 else middle, piece)
        if half == 1:
            flight.landed.add(dest)
            self._free_of(target, dest)
            flight.left -= 1
            if target.node.alive:
                target.complete.setdefault(part.epoch, set()).add(dest)
            if flight.left == 0:
                self._done(flight, target)

    def _check(self, target: Member, writer: Member, part: Part, dest: int, source: int) -> None:
        pool = target.pool
        assert pool is not None
        state = pool.state(dest)
        if state not in (BlockState.RESERVED, BlockState.QUARANTINED) or pool.epoch(dest) != part.epoch:
            raise Violation(
                f"a write under epoch {part.epoch} lands in block {dest} of {target.node.name}, "
                f"which is {state.name} under epoch {pool.epoch(dest)}"
            )
        if writer.node.alive and writer.pool is not None and writer.pool.state(source) is not BlockState.HELD:
            raise Violation(f"block {source} of {writer.node.name} is read by a write and is not held")

    def _done(self, flight: _Flight, target: Member) -> None:
        self._flights.remove(flight)
        if flight.failed:
            return
        rng, part, writer = self.world.rng, flight.part, flight.writer
        if target.node.alive:
            notice = NotificationArrived(writer.incarnation, part.manifest)
            for n in range(2 if rng.random() < self.faults.duplicate else 1):
                late = rng.choice((rng.uniform(0.0001, 0.01), rng.uniform(0.05, 1.5))) if n else 0.0
                late += rng.uniform(0.05, 1.5) if rng.random() < self.faults.late_notice else 0.0
                delay = rng.uniform(0.0001, 0.003) + late
                self._count("duplicate_notice" if n else "notice")
                self.world.after(delay, lambda: _tell(target, notice))
            done: TransportEvent = WriteDone(part.peer, part.epoch, part.part, 0.001)
        else:
            done = WriteFailed(part.peer, part.epoch, part.part, "the peer is gone")
        late = rng.uniform(0.05, 1.0) if rng.random() < self.faults.late_notice else 0.0
        self.world.after(rng.uniform(0.0001, 0.003) + late, lambda: _tell(writer, done))

    def _fail(self, flight: _Flight) -> None:
        """It ends badly for the writer; what was under way lands all the same."""
        if flight in self._flights and not flight.failed:
            flight.failed = True
            part = flight.part
            _tell(flight.writer, WriteFailed(part.peer, part.epoch, part.part, "injected"))

    def died(self, node: Node) -> None:
        """What it had on the wire lands within TAIL_S or never."""
        for flight in [f for f in self._flights if f.writer.node is node]:
            self.world.after(self.world.rng.uniform(0.0, TAIL_S), lambda flight=flight: self._stop(flight))  # type: ignore[misc]
        for flight in [f for f in self._flights if self._members[f.part.peer].node is node]:
            self._stop(flight)
            part = flight.part
            gone = WriteFailed(part.peer, part.epoch, part.part, "the peer is gone")
            delay = self.world.rng.uniform(0.0, 0.5)
            if not flight.failed:
                self.world.after(delay, lambda w=flight.writer, e=gone: _tell(w, e))  # type: ignore[misc]

    def _stop(self, flight: _Flight) -> None:
        if flight in self._flights:
            self._flights.remove(flight)
            target = self._members[flight.part.peer]
            for dest in flight.part.dest_ids:
                if dest not in flight.landed:
                    self._free_of(target, dest)

    def _free_of(self, target: Member, dest: int) -> None:
        target.writable[dest] -= 1
        if not target.writable[dest]:
            del target.writable[dest]

    def _count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def pairs_writing(self) -> list[tuple[Node, Node]]:
        """(writer, target) of the writes under way."""
        return [(flight.writer.node, self._members[flight.part.peer].node) for flight in self._flights]


def _tell(member: Member, event: TransportEvent) -> None:
    if member.node.alive:
        member.notify(event)


class OneSided:
    """The transport port over the fabric, for one incarnation."""

    name = "nixl"
    refuses_late = False

    def __init__(self, fabric: Fabric, member: Member) -> None:
        self._fabric, self._member = fabric, member
        self.peers: set[Incarnation] = set()
        fabric.join(member)

    def metadata(self) -> bytes:
        return b""

    def pool(self) -> PoolDescriptor:
        store = self._member.store
        return PoolDescriptor(store.base, store.block_bytes, store.num_blocks)

    def add_peer(self, incarnation: Incarnation) -> None:
        self.peers.add(incarnation)

    def drop_peer(self, incarnation: Incarnation) -> None:
        self.peers.discard(incarnation)

    def post(self, part: Part) -> None:
        if part.peer not in self.peers:
            raise Violation(f"{self._member.incarnation} writes to {part.peer}, which its transport does not know")
        self._fabric.post(self._member, part)
