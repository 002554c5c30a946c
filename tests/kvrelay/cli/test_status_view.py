"""The table of workers, as terminals of any width show it."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

import pytest
from rich.console import Console

from kvrelay.cli.status_view import topology_table
from kvrelay.client import Topology, WorkerStatus

FULL = "worker role incarnation pid run wait moving tok/s free held cached reserved quarantined counted so far"


def worker(name: str, counters: dict[str, int]) -> WorkerStatus:
    return {
        "id": name,
        "role": "decode",
        "incarnation": "ecc9834577744e53",
        "pid": 16123,
        "address": "127.0.0.1:1",
        "transport": "nixl",
        "executor": "hash",
        "blocks": {"total": 12345, "free": 12300, "held": 20, "cached": 25, "reserved": 0, "quarantined": 0},
        "running": 3,
        "waiting": 1,
        "queued_tokens": 0,
        "transfers_in_flight": 2,
        "tokens_per_s": 1234.5,
        "draining": False,
        "unwell": name == "sick",
        "silent_s": 0.0,
        "counters": counters,
    }


BOTH = (worker("decode-0", {"blocks_copied": 2, "matched_tokens": 368}), worker("decode-1", {}))


def lines(width: int, workers: Sequence[WorkerStatus] = BOTH, counters: Mapping[str, int] | None = None) -> list[str]:
    topology: Topology = {
        "coordinator_id": "c",
        "queued_requests": 0,
        "open_requests": 4,
        "workers": list(workers),
        "counters": dict(counters or {}),
    }
    console = Console(file=io.StringIO(), width=width)
    console.print(topology_table(topology, console.width))
    assert isinstance(console.file, io.StringIO)
    return [" ".join(line.split()) for line in console.file.getvalue().splitlines()]


def test_a_wide_terminal_shows_all_of_a_worker_in_its_row():
    _, head, first, second = lines(160)
    assert head == FULL
    assert first == "decode-0 decode ecc983 16123 3 1 2 1234 12300/12345 20 25 0 0 blocks_copied 2, matched_tokens 368"
    assert second == "decode-1 decode ecc983 16123 3 1 2 1234 12300/12345 20 25 0 0"


@pytest.mark.parametrize("width", [80, 100, 119])
def test_in_a_narrow_terminal_no_word_is_cut_and_what_was_counted_stands_below(width):
    _, head, first, second, below = lines(width)
    assert head == "worker run wait moving tok/s free held cached reserved quarantined"
    assert first == "decode-0 3 1 2 1234 12300/12345 20 25 0 0"
    assert second == "decode-1 3 1 2 1234 12300/12345 20 25 0 0"
    assert below == "decode-0: blocks_copied 2, matched_tokens 368"


def test_what_moving_cost_stands_in_the_title_and_a_worker_that_is_unwell_says_so():
    title, _, row = lines(160, [worker("sick", {})], {"migrated": 3, "recomputed_tokens": 170})
    assert title.endswith("3 moved to other workers so far, 170 tokens computed anew for it")
    assert row.endswith(" 0 0 unwell")
