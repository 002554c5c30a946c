"""What `kvrelay tbt` does with its flags: reads, reports, draws. Knows files and the screen."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrelay.errors import NotFound
from kvrelay.tbt.compare import compare
from kvrelay.tbt.join import Joined, join
from kvrelay.tbt.otlp import Problems
from kvrelay.tbt.reader import read
from kvrelay.tbt.report import report

WIDTH = 200
"""Where stdout is no terminal."""


@dataclass(frozen=True, slots=True)
class Options:
    paths: tuple[Path, ...]
    top: int
    compare: Path | None
    plot: Path | None
    request: str
    as_json: bool


def run(options: Options) -> None:
    """NotFound where there is nothing to read or nothing of ours in it; FailedPrecondition from plotting."""
    joined = _load(options.paths)
    found = report(joined, options.top)
    if options.plot is not None:
        from kvrelay.tbt.plot import plot

        plot(joined, options.plot, options.request)
    del joined  # a second recording may be as big
    if options.compare is None:
        _show(found, options.as_json)
        return
    other = report(_load((options.compare,)), options.top)
    rows = compare(found, other)
    if options.as_json:
        _print({"a": found, "b": other, "compare": [row.to_json() for row in rows]})
        return
    from kvrelay.tbt.view import compare_view

    _render(compare_view(rows, " ".join(map(str, options.paths)), str(options.compare)))


def _load(paths: Sequence[Path]) -> Joined:
    recording = read(list(paths))
    _tell(recording.problems)
    if not any(request.segments for request in recording.requests):
        where = " ".join(map(str, paths))
        others = f"{recording.num_spans} spans, none of them" if recording.num_spans else "no spans"
        raise NotFound(f"{where}: {others} with tokens of KVRelay; `kvrelay up --trace-dir DIR` records them")
    return join(recording)


def _tell(problems: Problems) -> None:
    for line in problems.told:
        print(f"kvrelay: {line}", file=sys.stderr)
    more = problems.num_skipped + problems.num_torn - len(problems.told)
    if more > 0:
        print(f"kvrelay: and {more} more that could not be read", file=sys.stderr)


def _show(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        _print(found)
        return
    from kvrelay.tbt.view import report_view

    _render(report_view(found))


def _print(value: object) -> None:
    print(json.dumps(value, ensure_ascii=False), flush=True)


def _render(view: Any) -> None:
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False).print(view)
