"""A worker whose engine hangs lives and computes nothing: it gets nothing new, and what it has moves in the end."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from support.door import Door, Pairs, held, until
from support.fake_workers import FakeWorker

from coordinator import stuck
from coordinator.readiness import health_name
from coordinator.stuck import GIVEN_UP_S, Stuck
from kvrelay.blocks import BlockCounts
from kvrelay.errors import Unavailable
from kvrelay.requests import Incarnation, Role
from kvrelay.session import Load, Prefill, Reserve, Start

WELL = Load(BlockCounts(8, 8))
UNWELL = replace(WELL, unwell=True)
D0 = FakeWorker(Role.DECODE, "d0").describe()
LETTERS = [97 + i % 26 for i in range(20)]


def hear(stuck: Stuck, load: Load, begin: float, end: float) -> list[float]:
    """A load every half second; when it was to be given up."""
    times = [begin + i / 2 for i in range(round((end - begin) * 2) + 1)]
    return [at for at in times if stuck.heard(D0, load, at)]


def test_a_worker_that_stays_unwell_is_given_up_once_until_it_is_well_again() -> None:
    all_of_them = Stuck()
    assert hear(all_of_them, WELL, 0.0, 50.0) == []
    assert hear(all_of_them, UNWELL, 50.5, 100.0) == [50.5 + GIVEN_UP_S]
    assert all_of_them.is_given_up(D0)
    assert hear(all_of_them, WELL, 100.5, 100.5) == []
    assert not all_of_them.is_given_up(D0)
    assert hear(all_of_them, UNWELL, 101.0, 112.0) == [101.0 + GIVEN_UP_S]


def test_one_that_is_well_again_in_time_is_kept_and_our_own_pause_proves_nothing() -> None:
    all_of_them = Stuck()
    assert hear(all_of_them, UNWELL, 0.0, 9.5) + hear(all_of_them, WELL, 10.0, 10.0) == []
    assert hear(all_of_them, UNWELL, 10.5, 15.0) == []
    assert hear(all_of_them, UNWELL, 60.0, 80.0) == [60.0 + GIVEN_UP_S]


def test_another_life_is_another_worker_and_who_is_gone_is_forgotten() -> None:
    all_of_them = Stuck()
    hear(all_of_them, UNWELL, 0.0, 20.0)
    assert not all_of_them.is_given_up(replace(D0, incarnation=Incarnation("two")))
    all_of_them.keep([D0])
    assert all_of_them.is_given_up(D0)
    all_of_them.keep([])
    assert not all_of_them.is_given_up(D0)


async def until_unwell(door: Door, worker: FakeWorker) -> None:
    """Until its coordinator heard of it, with a heartbeat."""
    worker.unwell = True
    roster = door.coordinator.roster
    await until(lambda: any(d.worker_id == worker.name and load and load.unwell for d, load, _ in roster.listing()))


async def test_a_worker_that_is_unwell_gets_nothing_new_and_its_streams_wait_for_it(door: Door, pairs: Pairs) -> None:
    _, _, d0, d1 = pairs
    held(d0, "token 4")
    answer, asked = door.begin(text="hello", max_tokens=9)
    await until(lambda: len(answer.tokens) == 4)
    await until_unwell(door, d0)
    others = [await door.ask(text="x" * i, max_tokens=3) for i in range(1, 5)]
    assert [o.ids for o in others] == [LETTERS[:3]] * 4
    assert (len(d0.commands(Reserve)), len(d1.commands(Reserve))) == (1, 4)
    assert door.coordinator.roster.is_usable(Role.DECODE)
    d0.unwell = False
    d0.let_go("token 4")
    await asked
    assert (answer.error, answer.ids) == (None, LETTERS[:9])
    assert door.counters["migrated"] == 0


async def test_what_a_stuck_worker_has_moves_once_it_is_given_up(
    door: Door, pairs: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stuck, "GIVEN_UP_S", 1.0)
    d0 = pairs[2]
    held(d0, "token 4")
    answer, asked = door.begin(text="hello", max_tokens=9)
    await until(lambda: len(answer.tokens) == 4)
    await until_unwell(door, d0)
    await asked
    assert (answer.error, answer.ids) == (None, LETTERS[:9])
    assert (door.counters["migrated"], door.counters["migrated.worker_lost"]) == (1, 1)
    assert answer.finished is not None
    assert answer.finished.decode_worker == "d1"
    await until(lambda: len(door.coordinator.roster.listing()) == 4)  # it has a session again, and stays unused
    assert (await door.ask(text="x", max_tokens=3)).error is None
    assert len(d0.commands(Start)) == 1
    d0.let_go("token 4")
    await door.idle()


async def test_a_role_whose_only_worker_is_stuck_is_not_ready_and_its_requests_end_until_it_is_well(
    door: Door, pair: tuple[FakeWorker, FakeWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stuck, "GIVEN_UP_S", 1.0)
    decode, roster = pair[1], door.coordinator.roster
    held(decode, "token 4")
    answer, asked = door.begin(text="hello", max_tokens=9)
    await until(lambda: len(answer.tokens) == 4)
    await until_unwell(door, decode)
    assert (roster.is_usable(Role.DECODE), roster.has(Role.DECODE)) == (False, True), health_name(Role.DECODE)
    await asked
    assert isinstance(answer.error, Unavailable)
    assert answer.ids == LETTERS[:4]
    await until(lambda: len(roster.listing()) == 2)
    assert not roster.has(Role.DECODE)
    assert isinstance((await door.ask(text="x", max_tokens=3)).error, Unavailable)
    decode.unwell = False
    decode.let_go("token 4")
    await until(lambda: roster.has(Role.DECODE) and roster.is_usable(Role.DECODE))
    assert (await door.ask(text="x", max_tokens=3)).ids == LETTERS[:3]
    await asyncio.sleep(0)


async def test_decode_does_without_the_only_prefill_worker_while_that_is_stuck(
    door: Door, pair: tuple[FakeWorker, FakeWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also once it has a session again, as nothing but its engine hangs: what comes then must not wait for it."""
    monkeypatch.setattr(stuck, "GIVEN_UP_S", 1.0)
    prefill, decode = pair
    roster = door.coordinator.roster
    held(prefill, "token0")
    _, moved = door.begin(text="hello", max_tokens=4)
    await until(lambda: prefill.commands(Prefill))
    await until_unwell(door, prefill)
    assert (await moved).ids == LETTERS[:4]
    await until(lambda: len(roster.listing()) == 2)
    assert not roster.has(Role.PREFILL)
    async with asyncio.timeout(5.0):
        assert (await door.ask(text="x", max_tokens=3)).ids == LETTERS[:3]
    assert [command.local_prefill for command in decode.commands(Reserve)] == [False, True, True]
    prefill.unwell = False
    prefill.let_go("token0")
    await until(lambda: roster.is_usable(Role.PREFILL))
    assert (await door.ask(text="x", max_tokens=3)).ids == LETTERS[:3]
    assert not decode.commands(Reserve)[3].local_prefill
