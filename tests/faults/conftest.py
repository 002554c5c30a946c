"""One budget for all tests of faults: at most one stream in a hundred ends UNAVAILABLE, all others are exact."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.history import Rules, Tally, judge, tally
from support.recorder import HashReference, History, Judge


@pytest.fixture(scope="session")
def counted() -> Iterator[list[Tally]]:
    """What all tests saw; held to the budget when the last one is over."""
    tallies: list[Tally] = []
    yield tallies
    total = sum(tallies, Tally())
    print(f"\n{len(tallies)} scenarios: {total.exact} streams exact, {total.unavailable} unavailable")
    assert total.within_budget, f"{total.unavailable} of {total.judged} streams ended UNAVAILABLE"


@pytest.fixture
def verdict(counted: list[Tally]) -> Judge:
    """judge a history: no violation, and its streams count for the budget (unless `counts` is False)."""

    def judged(history: History, rules: Rules | None = None, counts: bool = True) -> Tally:
        seen = tally(judge(history.streams, history.faults, HashReference(), rules))
        assert not seen.violations, "\n".join(seen.violations[:20])
        if counts:
            counted.append(seen)
        return seen

    return judged
