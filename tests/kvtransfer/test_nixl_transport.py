"""NIXL between two processes: bytes, death and return of the peer, and an owner thread that costs nothing idle."""

from __future__ import annotations

import gc
import hashlib
import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nixl_peer
import pytest
from handoff_values import MemoryPool, ticket_of

from kvrelay.errors import FailedPrecondition, Internal, LayoutMismatch, Unavailable
from kvrelay.link import PoolDescriptor
from kvrelay.requests import Incarnation
from kvtransfer.transports import nixl
from kvtransfer.transports.base import NotificationArrived, Part, TransportEvent, WriteDone, WriteFailed
from kvtransfer.transports.nixl import NixlTransport

BLOCK, BLOCKS = 64 * 1024, 256
WRITER = Incarnation("writer")


class Decode:
    """A child process with its pool; `ask` waits for an answer, or the test fails by its time limit."""

    def __init__(self, incarnation: str, num_blocks: int = BLOCKS, block_bytes: int = BLOCK) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, child = context.Pipe()
        self.name = Incarnation(incarnation)
        self.process = context.Process(target=nixl_peer.serve, args=(child, incarnation, num_blocks, block_bytes))
        self.process.start()
        child.close()
        self.metadata, self.pool = self._receive()

    def ask(self, command: str, argument: object = None) -> Any:
        self.pipe.send((command, argument))
        return self._receive()

    def _receive(self) -> Any:
        assert self.pipe.poll(60), "the decode process does not answer"
        return self.pipe.recv()

    def kill(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(10)

    def end(self) -> None:
        if self.process.is_alive():
            self.kill()
        self.process.join(10)
        self.pipe.close()


class Writer:
    def __init__(self, store: MemoryPool) -> None:
        self.store = store
        self.events: queue.Queue[TransportEvent] = queue.Queue()
        self.failed: queue.Queue[BaseException] = queue.Queue()
        self.transport = NixlTransport(WRITER, self.store, on_event=self.events.put, on_failed=self.failed.put)

    def add(self, decode: Decode) -> None:
        self.transport.add_peer(decode.name, decode.metadata, decode.pool)

    def wait(self, number: int) -> list[TransportEvent]:
        return [self.events.get(timeout=30) for _ in range(number)]

    def hash(self, block_ids: tuple[int, ...]) -> str:
        return hashlib.sha256(b"".join(self.store.read(i) for i in block_ids)).hexdigest()


@pytest.fixture
def writer() -> Iterator[Writer]:
    store = MemoryPool(BLOCKS, BLOCK)
    store.fill()
    w = Writer(store)
    yield w
    w.transport.close()
    assert w.failed.empty()


@pytest.fixture
def decode() -> Iterator[Decode]:
    d = Decode("decode-a")
    yield d
    d.end()


def part_of(peer: Incarnation, sources: tuple[int, ...], dests: tuple[int, ...], number: int = 0) -> Part:
    return Part(peer, 1, number, tuple(range(len(sources))), sources, dests, f"manifest {number}".encode())


def test_blocks_arrive_byte_equal_with_their_manifests(writer: Writer, decode: Decode) -> None:
    writer.add(decode)
    writer.add(decode)  # twice is once
    scattered, mirrored = tuple(range(0, 128, 2)), tuple(range(255, 191, -1))
    run = tuple(range(128, 192))
    writer.transport.post(part_of(decode.name, scattered, mirrored, 0))
    writer.transport.post(part_of(decode.name, run, tuple(range(64)), 1))
    writer.transport.post(part_of(decode.name, (7,), (100,), 2))
    ended = writer.wait(3)
    assert sorted((type(e), e.part) for e in ended if isinstance(e, WriteDone)) == [(WriteDone, n) for n in range(3)]
    notes = decode.ask("events", 3)
    assert {(n.peer, n.payload) for n in notes} == {(WRITER, f"manifest {n}".encode()) for n in range(3)}
    assert decode.ask("hash", mirrored) == writer.hash(scattered)
    assert decode.ask("hash", tuple(range(64))) == writer.hash(run)
    assert decode.ask("hash", (100,)) == writer.hash((7,))
    assert decode.ask("hash", (101,)) == hashlib.sha256(bytes(BLOCK)).hexdigest()
    decode.pipe.send(("stop", None))
    assert decode._receive() == "closed"


def until_stopped(pid: int) -> None:
    """A signal takes effect a little after it was sent; every thread must stand."""
    ends_at = time.monotonic() + 5
    while any(
        Path(f"/proc/{pid}/task/{thread}/stat").read_text().rpartition(")")[2].split()[0] != "T"
        for thread in os.listdir(f"/proc/{pid}/task")
    ):
        assert time.monotonic() < ends_at, "not stopped within 5 s"
        time.sleep(0.005)  # a poll, bounded above


def test_a_receiver_killed_in_the_middle_fails_every_write_and_its_successor_is_written_to(
    writer: Writer, decode: Decode
) -> None:
    writer.add(decode)
    everything = tuple(range(BLOCKS))
    writer.transport.post(part_of(decode.name, everything, everything[::-1], 99))
    assert isinstance(writer.wait(1)[0], WriteDone)
    assert decode.process.pid is not None
    os.kill(decode.process.pid, signal.SIGSTOP)  # a stopped receiver acknowledges nothing: no write may be called done
    until_stopped(decode.process.pid)
    for number in range(24):
        writer.transport.post(part_of(decode.name, everything, everything[::-1], number))
    with pytest.raises(queue.Empty):
        writer.events.get(timeout=0.3)
    decode.kill()
    ended = writer.wait(24)
    assert sorted(e.part for e in ended if isinstance(e, WriteFailed) and e.posted) == list(range(24))
    writer.transport.post(part_of(decode.name, (0,), (0,), 24))
    assert isinstance(writer.wait(1)[0], WriteFailed)
    writer.transport.drop_peer(decode.name)
    writer.transport.post(part_of(decode.name, (0,), (0,), 25))
    (unknown,) = writer.wait(1)
    assert isinstance(unknown, WriteFailed)
    assert not unknown.posted
    successor = Decode("decode-b", num_blocks=32)  # another pool size and base
    try:
        writer.add(successor)
        writer.transport.post(part_of(successor.name, everything[:32], everything[:32], 26))
        assert isinstance(writer.wait(1)[0], WriteDone)
        assert successor.ask("hash", everything[:32]) == writer.hash(everything[:32])
    finally:
        successor.end()


def test_a_peer_that_cannot_be_connected_to_is_not_taken_for_known_at_the_next_try(
    writer: Writer, decode: Decode, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = writer.transport._agent
    with monkeypatch.context() as patched:
        patched.setattr(agent._agent, "make_connection", lambda _: (_ for _ in ()).throw(RuntimeError("no way")))
        with pytest.raises(FailedPrecondition, match=r"cannot reach the pool of .*: no way"):
            writer.add(decode)
    assert agent.num_peers == 0
    writer.add(decode)
    writer.transport.post(part_of(decode.name, (3,), (5,)))
    assert isinstance(writer.wait(1)[0], WriteDone)
    assert decode.ask("hash", (5,)) == writer.hash((3,))


def test_the_owner_threads_cost_nothing_while_no_ticket_is_open(writer: Writer, decode: Decode) -> None:
    writer.add(decode)
    writer.transport.post(part_of(decode.name, (0,), (0,)))
    writer.wait(1)
    before = time.process_time()
    assert decode.ask("idle", 1.0) < 0.02
    assert time.process_time() - before < 0.03


def test_parts_and_pools_that_do_not_fit_are_refused_before_anything_is_sent(writer: Writer, decode: Decode) -> None:
    with pytest.raises(LayoutMismatch):
        writer.transport.add_peer(decode.name, decode.metadata, PoolDescriptor(decode.pool.base, BLOCK * 2, 8))
    with pytest.raises(FailedPrecondition):
        writer.transport.add_peer(decode.name, b"not metadata", decode.pool)
    with pytest.raises(FailedPrecondition):
        writer.transport.add_peer(Incarnation("decode-z"), decode.metadata, decode.pool)
    with pytest.raises(FailedPrecondition):
        writer.transport.add_peer(decode.name, decode.metadata, PoolDescriptor(decode.pool.base, BLOCK, BLOCKS * 1000))
    writer.add(decode)
    for wrong in (part_of(decode.name, (0,), (BLOCKS,)), part_of(decode.name, (-1,), (0,))):
        writer.transport.post(wrong)
        (event,) = writer.wait(1)
        assert isinstance(event, WriteFailed)
        assert not event.posted


def test_blocks_beyond_two_and_four_gigabytes_lie_where_they_should() -> None:
    mega, around = 1 << 20, (0, 2047, 2048, 4095, 4096, 4098)
    w, decode = Writer(MemoryPool(4100, mega)), Decode("decode-large", 4100, mega)
    try:
        for block_id in around[1:]:
            w.store.write(block_id, 0, block_id.to_bytes(4, "little") * (mega // 4))
        w.add(decode)
        w.transport.post(part_of(decode.name, around[1:], around[:0:-1]))
        assert isinstance(w.wait(1)[0], WriteDone)
        assert decode.ask("hash", around[:0:-1]) == w.hash(around[1:])
        assert decode.ask("hash", (0, 1)) == hashlib.sha256(bytes(2 * mega)).hexdigest()
    finally:
        decode.end()
        w.transport.close()


class StubAgent:
    """Stands for PoolAgent: answers `state` and `release` from lists, counts live handles."""

    def __init__(self, states: list[str | Exception], releases: list[bool] | None = None, start: str = "PROC") -> None:
        self.metadata, self.pool = b"m", PoolDescriptor(0, BLOCK, 8)
        self.states, self.releases, self.first, self.live = states, releases or [], start, 0
        self.notes: list[tuple[Incarnation, bytes]] = []

    def prepare(self, part: Part) -> object:
        self.live += 1
        return object()

    def start(self, handle: object) -> str:
        return self.first

    def state(self, handle: object) -> str:
        answer = self.states.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def release(self, handle: object) -> bool:
        released = self.releases.pop(0) if self.releases else True
        self.live -= released
        return released

    def notifications(self) -> list[tuple[Incarnation, bytes]]:
        notes, self.notes = self.notes, []
        return notes

    def add_peer(self, *_: object) -> None: ...

    def drop_peer(self, *_: object) -> None: ...

    def close(self) -> None: ...


def owner(stub: StubAgent, **callbacks: Any) -> NixlTransport:
    return NixlTransport(WRITER, MemoryPool(8, BLOCK), agent=lambda _i, _s: stub, **callbacks)  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize(
    ("state", "done"),
    [
        ("DONE", True),
        ("ERR", False),
        ("CANCELED", False),
        ("TIMEOUT", False),
        ("", False),
        (RuntimeError("NIXL_ERR_BACKEND"), False),
    ],
)
def test_only_done_is_done_and_every_handle_is_released(state: str | Exception, done: bool) -> None:
    events: queue.Queue[TransportEvent] = queue.Queue()
    stub = StubAgent(["PROC", state])
    transport = owner(stub, on_event=events.put)
    transport.post(part_of(Incarnation("d"), (0,), (0,)))
    assert isinstance(events.get(timeout=10), WriteDone if done else WriteFailed)
    transport.close()
    assert stub.live == 0


def test_a_handle_that_cannot_be_released_keeps_its_write_open_until_it_can() -> None:
    events: queue.Queue[TransportEvent] = queue.Queue()
    stub = StubAgent(["ERR"], releases=[False, False, True])
    transport = owner(stub, on_event=events.put)
    transport.post(part_of(Incarnation("d"), (0,), (0,)))
    assert events.get(timeout=10) == WriteFailed(Incarnation("d"), 1, 0, "state ERR")
    assert stub.releases == []
    transport.close()


def test_a_dead_owner_is_noticed_and_refuses_work() -> None:
    failed: queue.Queue[BaseException] = queue.Queue()
    stub = StubAgent([])
    stub.notifications = lambda: (_ for _ in ()).throw(RuntimeError("hook"))  # type: ignore[method-assign]
    transport = owner(stub, on_failed=failed.put)
    transport.expect(ticket_of())
    assert str(failed.get(timeout=10)) == "hook"
    with pytest.raises(Internal):
        transport.post(part_of(Incarnation("d"), (0,), (0,)))
    transport.close()


def test_an_owner_that_is_stuck_with_a_peer_is_named_and_refuses_no_other_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may come back: what it was asked meanwhile is done then."""
    monkeypatch.setattr(nixl, "CALL_TIMEOUT_S", 0.05)
    events: queue.Queue[TransportEvent] = queue.Queue()
    stub, goes_on = StubAgent(["DONE"]), threading.Event()
    stub.add_peer = lambda *_: goes_on.wait(10)  # type: ignore[assignment, method-assign, return-value]
    transport = owner(stub, on_event=events.put)
    with pytest.raises(Unavailable, match="the nixl owner thread did not answer"):
        transport.add_peer(Incarnation("d"), b"", PoolDescriptor(0, BLOCK, 8))
    transport.post(part_of(Incarnation("d"), (0,), (0,)))
    assert events.empty()
    goes_on.set()
    assert isinstance(events.get(timeout=10), WriteDone)
    monkeypatch.undo()
    transport.close()


def test_an_owner_that_does_not_come_round_is_seen_to_hang_and_one_that_rests_is_not() -> None:
    stub, looks, goes_on = StubAgent([]), threading.Event(), threading.Event()

    def notifications() -> list[tuple[Incarnation, bytes]]:
        looks.set()
        goes_on.wait(10)
        return []

    stub.notifications = notifications  # type: ignore[method-assign]  # a stub's is the test's to choose
    transport = owner(stub)
    time.sleep(0.05)  # it has nothing to do for so long
    assert transport.hangs_s == 0.0
    transport.expect(ticket_of())
    assert looks.wait(10)
    seen = transport.hangs_s
    time.sleep(0.05)
    assert transport.hangs_s >= seen + 0.05
    goes_on.set()
    transport.unexpect(1)
    ends_at = time.monotonic() + 10
    while transport.hangs_s:
        assert time.monotonic() < ends_at
    transport.close()


def test_an_agent_that_cannot_start_says_so_at_once() -> None:
    def broken(_incarnation: object, _store: object) -> Any:
        raise RuntimeError("no backend")

    with pytest.raises(RuntimeError, match="no backend"):
        NixlTransport(WRITER, MemoryPool(1, BLOCK), agent=broken)


def test_peers_may_come_and_go_while_writes_are_in_flight(writer: Writer, decode: Decode) -> None:
    """The agent is not thread-safe: everything goes through its owner, also with threads switching all the time."""
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    other = Decode("decode-b", num_blocks=8)
    try:
        writer.add(decode)
        for number in range(40):
            writer.transport.post(part_of(decode.name, tuple(range(64)), tuple(range(64)), number))
            writer.add(other)
            writer.transport.drop_peer(other.name)
        assert all(isinstance(e, WriteDone) for e in writer.wait(40))
        assert sum(isinstance(e, NotificationArrived) for e in decode.ask("events", 40)) == 40
        assert decode.ask("hash", tuple(range(64))) == writer.hash(tuple(range(64)))
    finally:
        sys.setswitchinterval(switch)
        other.end()
        gc.collect()
