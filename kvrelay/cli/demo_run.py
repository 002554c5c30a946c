"""The demo: brings a cluster up on a free port, streams one answer, prints what it cost."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from typing import TYPE_CHECKING

from kvrelay.cli.bench_stats import percentile
from kvrelay.cli.cluster import Cluster
from kvrelay.cli.members import plan_local
from kvrelay.cli.prompt import read_file_text
from kvrelay.cli.screen import Screen
from kvrelay.cli.serve import serve

if TYPE_CHECKING:
    from kvrelay.client import GenerateResult


def run_demo(options: dict[str, object], prompt_file: str, max_tokens: int) -> int:
    """The exit code; progress on stderr, answer and table on stdout. Raises KVRelayError."""
    text = read_file_text(prompt_file)
    began = time.monotonic()
    plan = plan_local(options, path="", env=os.environ, parent_pid=os.getpid())

    async def body(target: str, cluster: Cluster) -> int:
        screen.say(f"serving on {target} after {time.monotonic() - began:.1f} s; the prompt is {prompt_file}")
        print_costs(await _stream(target, text, max_tokens))
        return 0

    with Screen(quiet=True) as screen:
        screen.say("starting a coordinator, a prefill worker and a decode worker")
        return asyncio.run(serve(plan, screen, body))


async def _stream(target: str, text: str, max_tokens: int) -> GenerateResult:
    from kvrelay.client import AsyncClient

    chat = [{"role": "user", "content": text}]
    async with AsyncClient(target) as client, client.generate(chat, max_tokens=max_tokens, temperature=0.0) as stream:
        async for token in stream:
            print(token.text, end="", flush=True)
        print(stream.result.tail, end="\n\n", flush=True)
        return stream.result


def print_costs(result: GenerateResult) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in cost_rows(result):
        table.add_row(name, value)
    Console(file=sys.stdout).print(table)


def cost_rows(result: GenerateResult) -> list[tuple[str, str]]:
    """(name, value) of everything the demo shows."""
    rows = [
        ("prompt tokens", str(result.usage.prompt_tokens)),
        ("answer tokens", f"{result.usage.completion_tokens} ({result.finish_reason})"),
        ("TTFT", f"{result.ttft_ms or 0.0:.0f} ms"),
    ]
    if result.gaps_ms:
        gaps = result.gaps_ms
        rows.append(
            ("TBT p50 / p99 / max", f"{percentile(gaps, 50):.1f} / {percentile(gaps, 99):.1f} / {max(gaps):.1f} ms")
        )
    if result.hand_off and result.ttft_ms:
        moved = result.hand_off
        exposed_ms = moved.exposed_s * 1000.0
        rate = moved.num_bytes / moved.seconds / 1e9 if moved.seconds else 0.0
        rows += [
            ("KV moved", f"{moved.num_bytes / 1e6:.1f} MB in {moved.num_blocks} blocks"),
            ("transport", f"{moved.transport}, {rate:.2f} GB/s"),
            ("exposed hand-off", f"{exposed_ms:.1f} ms, {exposed_ms / result.ttft_ms:.1%} of TTFT"),
        ]
    return rows
