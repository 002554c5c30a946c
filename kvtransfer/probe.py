"""How fast blocks move between two processes over NIXL: GB/s for many blocks, latency of one. Knows no services.

`python -m kvtransfer.probe` writes and reads in two processes of its own and prints one JSON object.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import multiprocessing
import queue
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection

from kvrelay.blocks import BlockTable, Ticket
from kvrelay.requests import Incarnation
from kvtransfer.transports.base import Part, TransportEvent, WriteDone
from kvtransfer.transports.nixl import NixlTransport

BLOCK_BYTES = 368_640
"""A block of SmolLM2-135M: 3 KV heads, 30 layers, K and V, 16 tokens, head size 64, bfloat16."""
WRITER, READER = Incarnation("probe-writer"), Incarnation("probe-reader")
PROBED_BLOCKS = (1, 64)
PROBED_ROUNDS = 8
WARM_UP = 3
EVENT_TIMEOUT_S = 60.0


class ProbePool:
    """A block store whose pages are touched once, so that no page fault is measured."""

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self.num_blocks, self.block_bytes = num_blocks, block_bytes
        self._mapping = mmap.mmap(-1, num_blocks * block_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        self._view = memoryview(self._mapping)
        self._view[:] = bytes(len(self._view))

    def read(self, block_id: int) -> memoryview:
        return self._view[block_id * self.block_bytes : (block_id + 1) * self.block_bytes]

    def write(self, block_id: int, offset: int, data: bytes) -> None:
        start = block_id * self.block_bytes + offset
        self._view[start : start + len(data)] = data


@dataclass(frozen=True, slots=True)
class Row:
    """Medians over the rounds. write_s: from post to done; cpu_*: share of a core while writes run back to back."""

    blocks: int
    merged: bool
    write_s: float
    best_s: float
    gb_per_s: float
    cpu_writer: float
    cpu_reader: float


def receive(pipe: Connection, num_blocks: int, block_bytes: int) -> None:
    """The reading process: answers each message with the CPU seconds used so far, until None or the writer's end."""
    transport = NixlTransport(READER, ProbePool(num_blocks, block_bytes), on_event=lambda _event: None)
    transport.expect(Ticket(READER, 1, BlockTable(0, 16, (0,), 1)))
    pipe.send((transport.metadata(), transport.pool()))
    while pipe.recv() is not None:
        pipe.send(time.process_time())
    transport.close()


def measure(
    transport: NixlTransport,
    events: queue.SimpleQueue[TransportEvent],
    pipe: Connection,
    source_ids: tuple[int, ...],
    rounds: int,
    block_bytes: int,
) -> Row:
    """Write the blocks `rounds` times, one part at a time, after three rounds that do not count."""
    merged = len(source_ids) == 1 or source_ids[1] == source_ids[0] + 1
    seconds: list[float] = []
    for turn in range(rounds + WARM_UP):
        if turn == WARM_UP:
            pipe.send("cpu")
            begun, cpu_writer, cpu_reader = time.perf_counter(), time.process_time(), pipe.recv()
        transport.post(Part(READER, 1, turn, source_ids, source_ids, source_ids, b"manifest"))
        event = events.get(timeout=EVENT_TIMEOUT_S)
        if not isinstance(event, WriteDone):
            raise RuntimeError(f"a write failed: {event}")
        seconds.append(event.seconds)
    wall, used = time.perf_counter() - begun, time.process_time() - cpu_writer
    pipe.send("cpu")
    median, moved = statistics.median(seconds[WARM_UP:]), len(source_ids) * block_bytes
    share = (pipe.recv() - cpu_reader) / wall
    return Row(len(source_ids), merged, median, min(seconds[WARM_UP:]), moved / median / 1e9, used / wall, share)


def run(counts: Sequence[int], rounds: int, block_bytes: int, strides: Sequence[int] = (1, 2)) -> list[Row]:
    """Each count once a stride: 1 is neighbouring blocks (merged into few writes), 2 every other block (one each)."""
    num_blocks = max(counts) * max(strides)
    context = multiprocessing.get_context("spawn")
    pipe, child = context.Pipe()
    reader = context.Process(target=receive, args=(child, num_blocks, block_bytes), daemon=True)
    reader.start()
    child.close()  # else a reader that dies would leave us waiting
    events: queue.SimpleQueue[TransportEvent] = queue.SimpleQueue()
    transport = NixlTransport(WRITER, ProbePool(num_blocks, block_bytes), on_event=events.put)
    metadata, pool = pipe.recv()
    transport.add_peer(READER, metadata, pool)
    rows = []
    for count in counts:
        for stride in strides[:1] if count == 1 else strides:
            ids = tuple(range(0, count * stride, stride))
            rows.append(measure(transport, events, pipe, ids, rounds, block_bytes))
    pipe.send(None)
    reader.join(30)
    transport.close()
    return rows


def main() -> None:
    rows = run(PROBED_BLOCKS, PROBED_ROUNDS, BLOCK_BYTES, strides=(1,))
    print(json.dumps({"block_bytes": BLOCK_BYTES, "rows": [asdict(row) for row in rows]}))


if __name__ == "__main__":
    main()
