"""`kvrelay tbt` as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support import otlp_lines as otlp

from kvrelay.errors import FailedPrecondition, NotFound
from kvrelay.tbt.join import join
from kvrelay.tbt.plot import choose, plot
from kvrelay.tbt.reader import read

MAIN = (sys.executable, "-m", "kvrelay.cli.main", "tbt")


def tbt(*args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*MAIN, *map(str, args)], capture_output=True, text=True, timeout=100, check=False)


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """Request "late" moves to another worker between its second and third token; "plain" does not."""
    folder = tmp_path / "traces"
    folder.mkdir()
    steps = [
        {"start_s": 1.0 + n / 100, "forward_s": 0.01, "batch": 2, "prefill_tokens": 5 * (n == 7)} for n in range(20)
    ]
    spans = (
        otlp.root("plain", "1", accepted_s=11.0),
        otlp.decode("1", [0.05, 0.06, 0.07], [0, 6, 7]),
        otlp.root("late", "2", accepted_s=11.0),
        otlp.decode("2", [0.06, 0.07], [6, 7]),
        otlp.decode("2", [0.47], [1], worker="decode-1", first_index=2, attempt=1),
        otlp.steps(steps, clock_offset_s=10.0),
    )
    (folder / "coordinator-1.jsonl").write_text("".join(otlp.line(span) for span in spans))
    return folder


def test_the_command_prints_tables(recording: Path) -> None:
    done = tbt(recording, "--top", 1)
    assert (done.returncode, done.stderr) == (0, "")
    assert "2 requests, 6 tokens, 4 gaps, 20 steps in 1 files" in done.stdout
    assert "migration 400.00" in done.stdout


def test_json_is_one_object_and_a_torn_line_is_told_on_stderr(recording: Path) -> None:
    with (recording / "coordinator-1.jsonl").open("a") as out:
        out.write('{"resourceSpans":[{"sco')
    done = tbt(recording, "--json")
    told = json.loads(done.stdout)
    assert (done.returncode, told["tokens"], told["left_out"]["torn_lines"]) == (0, 6, 1)
    assert done.stderr.endswith("coordinator-1.jsonl:7: the last line ends in the middle, skipped\n")
    assert (told["worst"][0]["request_id"], told["worst"][0]["causes_ms"]) == ("late", {"migration": 400.0})


def test_a_recording_against_itself_has_no_differences(recording: Path) -> None:
    done = tbt(recording, "--compare", recording, "--json")
    told = json.loads(done.stdout)
    assert told["a"] == told["b"]
    assert {row["difference"] for row in told["compare"]} == {0}
    assert "TBT p99" in tbt(recording, "--compare", recording).stdout


def test_without_spans_of_ours_it_says_so_and_exits_1(tmp_path: Path) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text(otlp.line(otlp.span("GET /", {"http.route": "/"}, "1")))
    done = tbt(path)
    assert (done.returncode, done.stdout) == (1, "")
    assert "1 spans, none of them with tokens of KVRelay; `kvrelay up --trace-dir DIR` records them" in done.stderr


def test_a_file_that_is_not_otlp_is_named_and_exits_1(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("dear diary\n")
    done = tbt(path, "--json")
    assert (done.returncode, done.stdout) == (1, "")
    first, second = done.stderr.splitlines()
    assert first == f"kvrelay: {path}:1: not JSON, skipped"
    assert json.loads(second)["error"]["code"] == "NOT_FOUND"
    assert tbt(tmp_path / "gone").returncode == 1
    assert tbt(path, "--request", "r").returncode == 2


def test_the_picture_is_of_the_stream_with_the_longest_gap(recording: Path, tmp_path: Path) -> None:
    joined = join(read([recording]))
    assert joined.recording.requests[choose(joined).request].request_id == "late"
    assert joined.recording.requests[choose(joined, "plain").request].request_id == "plain"
    assert choose(joined, "plain").tokens.tolist() != choose(joined, "late").tokens.tolist()
    with pytest.raises(NotFound, match="no tokens of request nobody were recorded"):
        choose(joined, "nobody")
    for request in ("late", "plain"):
        plot(joined, tmp_path / f"{request}.png", request)
        assert (tmp_path / f"{request}.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(FailedPrecondition, match="cannot write"):
        plot(joined, tmp_path / "none" / "a.png")
    with pytest.raises(FailedPrecondition, match="cannot write"):
        plot(joined, tmp_path / "a.wav")


def test_a_request_of_one_token_without_steps_has_a_picture_too(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(otlp.line(otlp.decode("1", [0.05], [0], worker="")))
    plot(join(read([tmp_path])), tmp_path / "a.svg")
    assert b"<svg" in (tmp_path / "a.svg").read_bytes()


def test_help_shows_an_example() -> None:
    done = tbt("--help")
    assert done.returncode == 0
    assert "kvrelay tbt traces" in " ".join(done.stdout.split())
