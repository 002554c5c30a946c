"""How fast the CPU kernels are, against what this machine can do at best. Knows shapes, loads no model.

`python -m bench.kernels [--json] [--threads 1,2]`. The floor of a matrix product is the larger of reading the weights
once and multiplying at the measured peak; that of attention likewise, over scattered tiles. A ratio of 1.0 is the
floor, measured anew before each row. With one thread the clock is that thread's CPU time, so that a busy machine
disturbs less; with more it is the wall's.
"""

from __future__ import annotations

import argparse
import json
import math
import mmap
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from engine.attention.cpu import CpuAttention
from engine.linear import make_linear
from engine.native import Native, load, ops
from engine.tensors import StepBatch

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP, VOCAB = 30, 576, 9, 3, 64, 1536, 49152
BLOCK_SIZE = 16
READ_BYTES = 256 << 20
MATRICES = (((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN), (HIDDEN, HIDDEN), (2 * MLP, HIDDEN), (HIDDEN, MLP))
LANES = {"generic": 4, "avx2": 8, "avx512": 16}


@dataclass(frozen=True)
class Row:
    """One measurement: milliseconds of the best run, the floor of the same work, and the rate reached."""

    what: str
    threads: int
    ms: float
    floor_ms: float
    rate: str

    @property
    def ratio(self) -> float:
        return self.ms / self.floor_ms if self.floor_ms else 1.0


@dataclass(frozen=True)
class Floors:
    """What `threads` threads reach: bytes read a second in order, in scattered tiles of 4 KiB, and operations."""

    read: float
    read_tiles: float
    flops: float

    def ms(self, num_bytes: float, flops: float) -> float:
        return 1e3 * max(num_bytes / self.read, flops / self.flops)

    def tiles_ms(self, num_bytes: float, flops: float) -> float:
        return 1e3 * max(num_bytes / self.read_tiles, flops / self.flops)


def best_s(work: Callable[[], object], budget_s: float) -> float:
    """The shortest of as many runs as fit the budget, at least three."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    work()
    runs: list[float] = []
    while len(runs) < 3 or sum(runs) < budget_s:
        start = clock()
        work()
        runs.append(clock() - start)
    return min(runs)


def floors(kernels: Native, threads: int, budget_s: float) -> Floors:
    data = huge_zeros(READ_BYTES).view(torch.float32)
    tile_bytes = 2 * BLOCK_SIZE * HEAD_DIM * 2
    order = torch.randperm(data.nbytes // tile_bytes).to(torch.int32)
    tiles = best_s(
        lambda: kernels.read_tiles(data.data_ptr(), tile_bytes, order.data_ptr(), len(order), threads), budget_s
    )
    read = best_s(lambda: kernels.read(data.data_ptr(), data.nbytes, threads), budget_s)
    rounds = 2_000_000
    multiply = best_s(lambda: kernels.multiply(rounds, threads), budget_s)
    return Floors(
        data.nbytes / read, data.nbytes / tiles, rounds * 12 * LANES[kernels.instruction_set] * 2 * threads / multiply
    )


def huge_zeros(num_bytes: int) -> torch.Tensor:
    """uint8 memory that asks for huge pages, as a pool of blocks does."""
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapping, dtype=torch.uint8).zero_()


def linear_rows(kernels: Native, threads: int, counts: list[int], budget_s: float, kind: str) -> list[Row]:
    """All the linear layers of the model, each with weights of its own, so that nothing stays in a cache."""

    def prepared(n: int, k: int) -> Callable[[torch.Tensor], torch.Tensor]:
        weight = torch.randn(n, k).bfloat16()
        if kind == "torch":
            return lambda x: torch.nn.functional.linear(x.to(weight.dtype), weight)
        return make_linear(weight, threads=threads)

    layers = [(k, prepared(n, k)) for _ in range(LAYERS) for n, k in MATRICES]
    layers.append((HIDDEN, prepared(VOCAB, HIDDEN)))
    params = LAYERS * sum(n * k for n, k in MATRICES) + VOCAB * HIDDEN
    rows = []
    for count in counts:
        at = floors(kernels, threads, budget_s / 4)
        inputs = {k: torch.randn(count, k) for k in (HIDDEN, MLP)}
        seconds = best_s(lambda inputs=inputs: [layer(inputs[k]) for k, layer in layers], budget_s)  # type: ignore[misc]  # the default binds the loop's value
        rate = f"{params * 2 / seconds / 1e9:.1f} GB/s {params * 2 * count / seconds / 1e9:.0f} GFLOP/s"
        floor = at.ms(params * 2, params * 2 * count)
        rows.append(Row(f"all linear layers ({kind}), {count} rows", threads, seconds * 1e3, floor, rate))
    return rows


def attention_row(kernels: Native, threads: int, spans: list[tuple[int, int]], budget_s: float) -> Row:
    """One layer; spans are (tokens before, rows) of each sequence. All layers in turn, so that KV comes from memory."""
    batch = paged_batch(spans)
    pool_blocks = int(batch.block_tables.max()) + 1
    shape = (pool_blocks, KV_HEADS, LAYERS, 2, BLOCK_SIZE, HEAD_DIM)
    pool = huge_zeros(2 * math.prod(shape)).view(torch.bfloat16).view(shape).normal_()
    attend = CpuAttention(kernels, HEADS, KV_HEADS, HEAD_DIM, threads=threads)
    qkv = torch.randn(batch.num_tokens, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
    out, rope = torch.empty(batch.num_tokens, HEADS * HEAD_DIM), torch.ones(8192, HEAD_DIM)

    def step() -> None:
        for layer in range(LAYERS):
            attend.forward(layer, qkv, pool, batch, rope, out)

    at = floors(kernels, threads, budget_s / 4)
    seconds = best_s(step, budget_s) / LAYERS
    tokens = sum(start + rows for start, rows in spans)
    pairs = sum(rows * start + rows * (rows + 1) // 2 for start, rows in spans)
    num_bytes, flops = tokens * KV_HEADS * HEAD_DIM * 4, pairs * HEADS * HEAD_DIM * 4
    what = " + ".join(f"{n} x ({rows} rows at {start})" for (start, rows), n in counted(spans).items())
    rate = f"{num_bytes / seconds / 1e9:.1f} GB/s {flops / seconds / 1e9:.0f} GFLOP/s"
    return Row(f"attention, one layer: {what}", threads, seconds * 1e3, at.tiles_ms(num_bytes, flops), rate)


def counted(spans: list[tuple[int, int]]) -> dict[tuple[int, int], int]:
    return {span: spans.count(span) for span in spans}


def paged_batch(spans: list[tuple[int, int]]) -> StepBatch:
    """Sequences on blocks dealt at random."""
    needs = [-(-(start + rows) // BLOCK_SIZE) for start, rows in spans]
    order = torch.randperm(sum(needs), generator=torch.Generator().manual_seed(1)).to(torch.int32)
    tables = torch.zeros(len(spans), max(needs), dtype=torch.int32)
    for i, need in enumerate(needs):
        tables[i, :need] = order[sum(needs[:i]) : sum(needs[: i + 1])]
    lens = torch.tensor([rows for _, rows in spans])
    positions = torch.cat([torch.arange(start, start + rows) for start, rows in spans])
    sequences = torch.repeat_interleave(torch.arange(len(spans)), lens)
    return StepBatch(
        token_ids=torch.zeros(len(positions), dtype=torch.int64),
        positions=positions.to(torch.int32),
        slot_blocks=tables[sequences, positions // BLOCK_SIZE],
        slot_offsets=(positions % BLOCK_SIZE).to(torch.int32),
        cu_seqlens_q=torch.nn.functional.pad(lens.cumsum(0), (1, 0)).to(torch.int32),
        context_lens=torch.tensor([start + rows for start, rows in spans], dtype=torch.int32),
        block_tables=tables,
        sample_rows=torch.zeros(0, dtype=torch.int64),
    )


def small_rows(threads: int, budget_s: float) -> list[Row]:
    """A call of each small operation on one row: mostly what Python costs."""
    x, residual, weight = torch.randn(1, HIDDEN), torch.randn(1, HIDDEN), torch.ones(HIDDEN)
    gate_up = torch.randn(1, 2 * MLP)
    tiny = make_linear(torch.randn(32, 16), threads=1)
    tiny_x = torch.randn(1, 16)
    calls: dict[str, Callable[[], object]] = {
        "add_rms_norm, 1 row": lambda: ops.add_rms_norm(x, residual, weight, 1e-5, threads=threads),
        "silu_mul, 1 row": lambda: ops.silu_mul(gate_up, threads=threads),
        "linear 16 -> 32, 1 row": lambda: tiny(tiny_x),
    }
    repeat = 1000
    found = []
    for what, call in calls.items():
        seconds = best_s(lambda call=call: [call() for _ in range(repeat)], budget_s / 10)  # type: ignore[misc]  # as above
        found.append(Row(what, threads, seconds * 1e3 / repeat, 0, f"{seconds / repeat * 1e6:.1f} us a call"))
    return found


def measure(threads: int, budget_s: float, baseline: bool) -> list[Row]:
    kernels = load()
    torch.set_num_threads(threads)
    at = floors(kernels, threads, budget_s)
    rows = [
        Row("read 256 MiB", threads, READ_BYTES / at.read * 1e3, 0, f"{at.read / 1e9:.1f} GB/s"),
        Row("read scattered 4 KiB", threads, READ_BYTES / at.read_tiles * 1e3, 0, f"{at.read_tiles / 1e9:.1f} GB/s"),
        Row("multiply-add", threads, 0, 0, f"{at.flops / 1e9:.0f} GFLOP/s ({kernels.instruction_set})"),
        *linear_rows(kernels, threads, [1, 8, 32, 256], budget_s, "prepared"),
    ]
    if baseline:
        rows += linear_rows(kernels, threads, [1, 32], budget_s, "torch")
    for spans in ([(511, 1)], [(511, 1)] * 32, [(512, 512)], [(0, 1024)]):
        rows.append(attention_row(kernels, threads, spans, budget_s))
    return rows + small_rows(threads, budget_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", default="1,2", help="thread counts, comma-separated")
    parser.add_argument("--seconds", type=float, default=1.0, help="time for each measurement")
    parser.add_argument("--torch", action="store_true", help="also plain torch, for comparison")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = [r for n in options.threads.split(",") for r in measure(int(n), options.seconds, options.torch)]
    if options.json:
        print(json.dumps([asdict(row) | {"ratio": row.ratio} for row in rows], indent=1))
        return
    print(f"{'':58} {'threads':>7} {'ms':>9} {'floor':>8} {'ratio':>6}")
    for row in rows:
        bound = f"{row.floor_ms:8.3f} {row.ratio:6.2f}" if row.floor_ms else f"{'':15}"
        print(f"{row.what:58} {row.threads:7} {row.ms:9.3f} {bound}  {row.rate}")


if __name__ == "__main__":
    main()
