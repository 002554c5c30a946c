"""Makes the figures of the README: one cluster (1 prefill, 1 decode, one thread each), one `kvrelay bench` a figure.

    python bench/figures.py                     all of them, JSON and the plot into results/
    python bench/figures.py --only interference

Run it on an otherwise idle machine: a busy core shows up as late tokens.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KVRELAY = (sys.executable, "-m", "kvrelay.cli.main")


@dataclass(frozen=True)
class Figure:
    """flags of `kvrelay bench`, and which of its figures counts: a path of keys, with its unit."""

    flags: str
    key: tuple[str, ...]
    unit: str


FIGURES = {
    "one stream, TBT p50": Figure(
        "--requests 4 --concurrency 1 --prompt-tokens 128 --output-tokens 128", ("tbt_ms", "p50"), "ms"
    ),
    "8 streams, TBT p50": Figure(
        "--requests 24 --concurrency 8 --prompt-tokens 128 --output-tokens 128", ("tbt_ms", "p50"), "ms"
    ),
    "32 streams, output": Figure(
        "--requests 96 --concurrency 32 --prompt-tokens 128 --output-tokens 128", ("output_tokens_per_s",), "tokens/s"
    ),
    "prefill of 1,024-token prompts": Figure(
        "--requests 16 --concurrency 2 --prompt-tokens 1024 --output-tokens 1", ("prompt_tokens_per_s",), "tokens/s"
    ),
    "exposed hand-off at 1,024 tokens": Figure(
        "--requests 12 --concurrency 1 --prompt-tokens 1024 --output-tokens 8",
        ("exposed_hand_off_share_of_ttft_p50",),
        "of TTFT",
    ),
    "interference, TBT p99 / quiet p50": Figure(
        "--scenario interference --streams 8 --long-prompt 1024 --seconds 20", ("p99_over_quiet_p50",), "x"
    ),
    "interference, output of the 8 streams": Figure(
        "--scenario interference --streams 8 --long-prompt 1024 --seconds 20",
        ("interfered", "output_tokens_per_s"),
        "tokens/s",
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--only", default="", help="figures whose name contains this")
    parser.add_argument("up", nargs="*", help="further flags of `kvrelay up`, after --")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    done: dict[str, dict[str, Any]] = {}
    with cluster(arguments.out, arguments.up) as target:
        for name, figure in FIGURES.items():
            if arguments.only in name:
                if figure.flags not in done:
                    done[figure.flags] = measure(target, figure, arguments.out)
                print(f"{name:42} {value_of(done[figure.flags], figure.key):>10} {figure.unit}", flush=True)


@contextmanager
def cluster(out: Path, flags: list[str]) -> Iterator[str]:
    """The target of a cluster that lives as long as the block."""
    command = [*KVRELAY, "up", "--listen", "127.0.0.1:0", "--threads", "1", "--log-dir", str(out / "logs"), *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line.startswith("ready "):
                raise SystemExit("the cluster did not start")
            yield line.split()[1]
        finally:
            process.send_signal(signal.SIGTERM)


def measure(target: str, figure: Figure, out: Path) -> dict[str, Any]:
    """Run one benchmark; its JSON, and the plot of the interference scenario, stay in `out`."""
    interference = "interference" in figure.flags
    flags = [*figure.flags.split(), *(["--plot", str(out / "interference.png")] if interference else [])]
    command = [*KVRELAY, "bench", "--target", target, "--json", "-", *flags]
    output = subprocess.run(command, stdout=subprocess.PIPE, check=False).stdout
    if not output:
        raise SystemExit(f"no figures: {' '.join(command)}")
    figures: dict[str, Any] = json.loads(output)
    if figures.get("errors"):
        print(
            f"{figures['errors']} requests failed: {figures['error_counts']} {figures['first_error']}", file=sys.stderr
        )
    name = "interference" if interference else figure.flags.replace("--", "").replace(" ", "-")
    (out / f"{name}.json").write_text(json.dumps(figures, indent=2) + "\n")
    return figures


def value_of(figures: dict[str, Any], key: tuple[str, ...]) -> Any:
    for part in key:
        figures = figures[part]
    return figures


if __name__ == "__main__":
    main()
