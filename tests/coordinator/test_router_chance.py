"""What blind routing finds: of eight workers one has the cached history."""

from __future__ import annotations

from coordinator.prefix_index import PrefixIndex
from coordinator.router import Rules, route
from coordinator.views import DecodeView, PrefillView, Snapshot, Want
from kvrelay.requests import WorkerId

DRAWS = 10_000
CHANCE = 1 / 8
THREE_SIGMA = 3 * (DRAWS * CHANCE * (1 - CHANCE)) ** 0.5


def test_random_routing_finds_the_one_worker_of_eight_in_12_5_of_100_cases() -> None:
    prefill = tuple(PrefillView(WorkerId(f"p{n}"), total_blocks=100) for n in range(8))
    decode = tuple(DecodeView(WorkerId(f"d{n}"), f"d{n}:1", free_blocks=100, total_blocks=100) for n in range(8))
    rules, index, want = Rules(policy="random"), PrefixIndex(), Want(100, True, last_slots=108)
    found = {f"{role}{n}": 0 for role in "pd" for n in range(8)}
    for serial in range(DRAWS):
        routed = route(Snapshot(prefill, decode, index, serial), want, rules)
        assert routed is not None
        for worker in (routed.placement.prefill, routed.placement.decode):
            assert worker is not None
            found[worker] += 1
    for worker, times in found.items():
        assert abs(times - DRAWS * CHANCE) < THREE_SIGMA, f"{worker} was drawn {times} times of {DRAWS}"
