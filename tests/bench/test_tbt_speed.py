"""The recording that the speed of `kvrelay tbt` is measured with: small, and as it is described."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).resolve().parents[2] / "bench" / "tbt.py"


def test_a_small_recording_is_read_whole_and_all_of_it_explained(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCH), "--requests", "8", "--tokens", "300", "--json", "--keep", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    figures = json.loads(done.stdout)
    assert (figures["requests"], figures["tokens"], figures["steps"]) == (8, 2400, 1200)
    assert (figures["unexplained_share"], figures["cpu_s"] > 0, figures["max_rss_mb"] > 0) == (0.0, True, True)
    assert len(list(tmp_path.glob("*.jsonl"))) == 8
