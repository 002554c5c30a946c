"""A bug of ours ends the request that it concerns, at once, and holds up nobody else."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from support.door import Door, held, join, until
from support.fake_workers import FakeWorker, OneRow

from coordinator import passing
from coordinator.output import OutputText
from coordinator.roster import Roster
from coordinator.router import Routed, Rules, route
from coordinator.views import Snapshot, Want
from kvrelay.errors import Internal
from kvrelay.requests import Role
from kvrelay.session import Reserve

BAD = "seven!!"


@pytest_asyncio.fixture
async def decode(door: Door) -> AsyncIterator[FakeWorker]:
    async with FakeWorker(Role.PREFILL, "p0") as prefill, OneRow(Role.DECODE, "d0") as worker:
        await join(door, prefill, worker)
        yield worker


@pytest.fixture
def raising(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Once it holds anything the router raises for BAD."""
    is_on: list[bool] = []

    def routed(snapshot: Snapshot, want: Want, rules: Rules) -> Routed | None:
        if is_on and want.num_tokens == len(BAD):
            raise ZeroDivisionError
        return route(snapshot, want, rules)

    monkeypatch.setattr(passing, "route", routed)
    return is_on


async def test_a_newcomer_that_the_router_raises_for_ends_and_the_next_one_is_served(
    door: Door, decode: FakeWorker, raising: list[bool]
) -> None:
    raising.append(True)
    assert type((await door.ask(text=BAD, max_tokens=3)).error) is Internal
    assert (await door.ask(text="x", max_tokens=3)).error is None
    await door.idle()


async def test_one_that_waits_ends_alone_and_those_around_it_go_on(
    door: Door, decode: FakeWorker, raising: list[bool]
) -> None:
    held(decode, "decode")
    texts = ("a", "b", "c", BAD, "d")
    asked = []
    for number, text in enumerate(texts, 1):
        asked.append(door.begin(text=text, max_tokens=3)[1])
        await until(lambda number=number: door.coordinator.dispatcher.num_open == number)
    await until(lambda: door.coordinator.dispatcher.num_queued >= 3)
    raising.append(True)
    decode.let_go("decode")
    errors = [type((await one).error) for one in asked]
    assert errors == [type(None), type(None), type(None), Internal, type(None)]
    await door.idle()


async def test_a_request_that_cannot_be_assigned_ends_and_is_not_lost(
    door: Door, decode: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(Roster, "assign", broken)
        assert type((await door.ask(text="x", max_tokens=3)).error) is Internal
    assert decode.commands(Reserve) == []
    assert (await door.ask(text="x", max_tokens=3)).error is None
    await door.idle()


async def test_a_request_whose_commands_cannot_be_sent_has_an_end_and_the_session_goes_on(
    door: Door, decode: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    held(decode, "token 2")
    answer, asked = door.begin(text="x", max_tokens=5)
    await until(lambda: len(answer.tokens) == 2)
    with monkeypatch.context() as patched:
        patched.setattr(OutputText, "push", broken)  # so that decode would be told
        patched.setattr(Roster, "send", broken)
        decode.let_go("token 2")
        assert type((await asked).error) is Internal
    assert len(decode.sessions) == 1
    assert (await door.ask(text="x", max_tokens=3)).error is None
    await door.idle()


def broken(*_: object) -> None:
    raise ZeroDivisionError
