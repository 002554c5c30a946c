"""A cluster for all tests of faults, and one budget: of a hundred streams at most one ends UNAVAILABLE."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.history import Rules, Tally, judge, tally
from support.members import Members, members
from support.recorder import HashReference, History, Judge

COMMON = ("--num-blocks", "128", "--step-tokens", "64", "--step-seconds", "0.01")


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


@pytest.fixture(scope="session")
def relay(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Members]:
    """2 + 2 workers of the hash model over the transport of the parameter; d0 stands behind a proxy."""
    directory = tmp_path_factory.mktemp(request.param)
    with members(directory, common=("--transport", request.param, *COMMON), proxied=("d0",)) as cluster:
        yield cluster


@pytest.fixture
def cluster(relay: Members) -> Members:
    """`relay` in good order, whatever an earlier test did; each test leaves it with nothing held."""
    relay.mend()
    relay.until_quiet()
    return relay
