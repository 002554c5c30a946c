"""How long `kvrelay tbt` takes for a recording of a million tokens: seconds of CPU, and the most memory it held.

    python bench/tbt.py                          2,000 requests of 500 tokens over 40,000 steps of 4 workers
    python bench/tbt.py --requests 200 --json
    python bench/tbt.py --keep recording    keeps the files, for a look with `kvrelay tbt`

The recording is made here, not measured: batches of 25, steps of 10 ms, a long prompt in one step of 100 that makes it
40 ms longer. Exit code 1 if the run takes more CPU than --limit-s.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support import otlp_lines as otlp

WORKERS, BATCH, SEGMENT, STEPS_A_SPAN = 4, 25, 512, 256
CLOCK_OFFSET_S = 1000.0
STEP_S, PROMPT_S, SEND_S = 0.010, 0.040, 0.0005


@dataclass(frozen=True)
class Figures:
    """What a run took. cpu_s: of user and system, by the kernel's account."""

    requests: int
    tokens: int
    steps: int
    file_mb: float
    wall_s: float
    cpu_s: float
    max_rss_mb: float
    unexplained_share: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=500, help="of each request")
    parser.add_argument("--keep", type=Path, help="write the recording into this folder and leave it there")
    parser.add_argument("--limit-s", type=float, default=20.0, help="of CPU, beyond which it fails")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        directory = args.keep or Path(folder)
        directory.mkdir(parents=True, exist_ok=True)
        steps = write(directory, args.requests, args.tokens)
        figures = measure(directory, args.requests, args.requests * args.tokens, steps)
    if args.json:
        print(json.dumps(asdict(figures)))
    else:
        for name, value in asdict(figures).items():
            print(f"{name:18} {value:g}")
    return 0 if figures.cpu_s <= args.limit_s else 1


def write(directory: Path, requests: int, tokens: int) -> int:
    """A file of requests and one of steps for each worker; the number of steps."""
    total = 0
    for number in range(WORKERS):
        waves = -(-len(range(number, requests, WORKERS)) // BATCH)
        starts, records = _steps(waves * tokens)
        worker = f"decode-{number}"
        with (directory / f"steps-{number}.jsonl").open("w") as out:
            for first in range(0, len(records), STEPS_A_SPAN):
                part = records[first : first + STEPS_A_SPAN]
                span = otlp.steps(part, worker=worker, clock_offset_s=CLOCK_OFFSET_S, first_id=first + 1)
                out.write(otlp.line(span))
        with (directory / f"requests-{number}.jsonl").open("w") as out:
            for place, request in enumerate(range(number, requests, WORKERS)):
                out.write(otlp.line(*_request(f"r{request}", place, tokens, starts, worker)))
        total += len(records)
    return total


def _steps(count: int) -> tuple[list[float], list[dict[str, float]]]:
    """Starts on the coordinator's clock, and the records."""
    starts, records, now = [], [], 1.0
    for number in range(count):
        prompt = PROMPT_S if number % 100 == 99 else 0.0
        starts.append(now + CLOCK_OFFSET_S)
        records.append(
            {
                "start_s": now,
                "schedule_s": 0.0002,
                "build_s": 0.0003,
                "forward_s": STEP_S - 0.0015 + prompt,
                "sample_s": 0.0005,
                "send_s": SEND_S,
                "batch": BATCH,
                "prefill_tokens": 512 if prompt else 0,
                "num_tokens": BATCH + (512 if prompt else 0),
                "blocks_used": 1000 + number % 500,
            }
        )
        now += STEP_S + prompt + 0.0002
    return starts, records


def _request(name: str, place: int, tokens: int, starts: list[float], worker: str) -> Iterator[dict[str, Any]]:
    """A wave of BATCH requests runs together, then comes the next; token 0 is from prefill."""
    first = place // BATCH * tokens
    accepted = starts[first] - 0.2
    offsets, sent, ids = [0.15], [0.1502], [0]
    for index in range(first, first + tokens - 1):
        ends = starts[index + 1] if index + 1 < len(starts) else starts[index] + STEP_S
        offsets.append(round(ends - accepted, 7))
        sent.append(round(ends - accepted + 0.0002, 7))
        ids.append(index + 1)
    yield otlp.root(name, name, accepted)
    yield otlp.piece("queue", name, 0.0, 0.01)
    yield otlp.piece("prefill", name, 0.01, 0.15, "prefill-0")
    yield otlp.piece("kv.push", name, 0.1, 0.16, "prefill-0")
    for begin in range(0, tokens, SEGMENT):
        part = slice(begin, begin + SEGMENT)
        yield otlp.decode(
            name,
            offsets[part],
            ids[part],
            worker=worker,
            sent_s=sent[part],
            batch=[BATCH] * len(ids[part]),
            first_index=begin,
        )


def measure(directory: Path, requests: int, tokens: int, steps: int) -> Figures:
    """Runs the command in a process of its own. CalledProcessError where it fails."""
    command = [sys.executable, "-m", "kvrelay.cli.main", "tbt", str(directory), "--json"]
    file_mb = sum(path.stat().st_size for path in directory.glob("*.jsonl")) / 1e6
    started = time.monotonic()
    with tempfile.TemporaryFile() as out:
        process = subprocess.Popen(command, stdout=out)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command)
        out.seek(0)
        report = json.load(out)
    return Figures(
        requests=requests,
        tokens=report["tokens"],
        steps=steps,
        file_mb=round(file_mb, 1),
        wall_s=round(time.monotonic() - started, 2),
        cpu_s=round(usage.ru_utime + usage.ru_stime, 2),
        max_rss_mb=round(usage.ru_maxrss / 1024, 1),
        unexplained_share=report["causes"]["shares"].get("unexplained", 0.0),
    )


if __name__ == "__main__":
    sys.exit(main())
