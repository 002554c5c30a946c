"""A worker's sessions, with the coordinator as a queue: greeting, order, merging, endings."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from support.greetings import DECODE

from kvrelay import fault_points
from kvrelay.blocks import BlockCounts, BlockEventKind, BlockEvents, BlockKey, BlockRun
from kvrelay.errors import FailedPrecondition, InvalidArgument
from kvrelay.requests import RequestId, SessionId
from kvrelay.session import (
    Abort,
    Command,
    Drain,
    Heartbeat,
    Hello,
    Load,
    Report,
    TokenOut,
)
from worker import session_hub
from worker.events import CommandReceived, Event, SessionClosed, SessionOpened
from worker.mailbox import Mailbox
from worker.session_hub import SessionHub

LOAD = Load(BlockCounts(8, 8))
S1, S2 = SessionId("s1"), SessionId("s2")


def token(index: int) -> TokenOut:
    return TokenOut(RequestId("r"), 1, 0, index, index)


class Coordinator:
    """Says commands, keeps reports. `stalled` stops it from reading."""

    def __init__(self, hub: SessionHub) -> None:
        self.commands: asyncio.Queue[Command | None] = asyncio.Queue()
        self.reports: list[Report] = []
        self.reading = asyncio.Event()
        self.reading.set()
        self.task = asyncio.ensure_future(hub.serve(self._said(), self._write))

    async def _said(self) -> AsyncIterator[Command]:
        while (command := await self.commands.get()) is not None:
            yield command

    async def _write(self, report: Report) -> None:
        await self.reading.wait()
        self.reports.append(report)

    def say(self, *commands: Command | None) -> None:
        for command in commands:
            self.commands.put_nowait(command)

    async def until_reports(self, n: int) -> list[Report]:
        async with asyncio.timeout(5):
            while len(self.reports) < n:  # noqa: ASYNC110  # the code under test sets no event
                await asyncio.sleep(0)
        return self.reports


@pytest.fixture
def box() -> Mailbox[Event]:
    return Mailbox()


@pytest.fixture
def hub(box: Mailbox[Event]) -> SessionHub:
    return SessionHub(box, DECODE, lambda: LOAD)


async def test_a_session_is_welcomed_its_commands_kept_in_order_and_its_end_told(
    hub: SessionHub, box: Mailbox[Event]
) -> None:
    c = Coordinator(hub)
    drain, abort = Drain(1.0), Abort(RequestId("r"), 1)
    c.say(Hello("c", S1), drain, abort, None)
    await asyncio.wait_for(c.task, 5)
    assert c.reports[0].welcome == DECODE
    assert c.reports[0].load == LOAD
    assert box.take(0) == [
        SessionOpened(S1, "c"),
        CommandReceived(S1, drain),
        CommandReceived(S1, abort),
        SessionClosed(S1),
    ]
    assert hub.num_sessions == 0


async def test_steps_merge_into_one_report_while_the_coordinator_does_not_read(hub: SessionHub) -> None:
    c = Coordinator(hub)
    c.say(Hello("c", S1))
    await c.until_reports(1)
    c.reading.clear()
    for step in range(1, 6):
        hub.send(S1, Report(step_id=step, tokens=(token(step - 1),)))
        await asyncio.sleep(0)
    c.reading.set()
    async with asyncio.timeout(5):
        while sum(len(r.tokens) for r in c.reports) < 5:  # noqa: ASYNC110  # as above
            await asyncio.sleep(0)
    assert [t.index for r in c.reports for t in r.tokens] == [0, 1, 2, 3, 4]
    assert len(c.reports) <= 3, "the first may be on its way already, the rest is one report"
    assert c.reports[-1].step_id == 5
    c.say(None)
    await asyncio.wait_for(c.task, 5)


async def test_heartbeats_are_answered_with_their_number_and_the_load(hub: SessionHub) -> None:
    c = Coordinator(hub)
    c.say(Hello("c", S1), Heartbeat(41, 1.0))
    reports = await c.until_reports(2)
    assert reports[1].heartbeat_seq == 41
    assert reports[1].load == LOAD
    assert reports[1].sent_at_s > 0
    c.say(None)
    await asyncio.wait_for(c.task, 5)


async def test_a_worker_that_is_not_well_says_so_with_every_load_whoever_made_it(box: Mailbox[Event]) -> None:
    healthy = [False]
    hub = SessionHub(box, DECODE, lambda: LOAD, lambda: healthy[0])
    c = Coordinator(hub)
    c.say(Hello("c", S1))
    reports = await c.until_reports(1)
    assert reports[0].load == replace(LOAD, unwell=True)
    hub.send(S1, Report(tokens=(token(0),), load=LOAD))
    reports = await c.until_reports(2)
    assert reports[1].load == replace(LOAD, unwell=True)
    healthy[0] = True
    hub.send(S1, Report(tokens=(token(1),), load=LOAD))
    assert (await c.until_reports(3))[2].load == LOAD
    c.say(None)
    await asyncio.wait_for(c.task, 5)


async def test_a_new_session_of_the_same_coordinator_ends_the_old_one_first(
    hub: SessionHub, box: Mailbox[Event]
) -> None:
    old = Coordinator(hub)
    old.say(Hello("c", S1))
    await old.until_reports(1)
    other = Coordinator(hub)
    other.say(Hello("another", SessionId("s9")))
    await other.until_reports(1)
    new = Coordinator(hub)
    new.say(Hello("c", S2))
    await new.until_reports(1)
    await asyncio.wait_for(old.task, 5)
    told = [e for e in box.take(0) if getattr(e, "session", "") in (S1, S2)]
    assert told[:3] == [SessionOpened(S1, "c"), SessionClosed(S1), SessionOpened(S2, "c")]
    hub.send(S1, Report(tokens=(token(0),)))
    assert hub.num_sessions == 2
    for c in (other, new):
        c.say(None)
        await asyncio.wait_for(c.task, 5)


@pytest.mark.parametrize(
    ("commands", "error", "field"),
    [
        ([Heartbeat(1, 1.0)], InvalidArgument, "command.hello"),
        ([None], InvalidArgument, "command.hello"),
        ([replace(Hello("c", S1), protocol_version=99)], FailedPrecondition, "protocol_version"),
        ([Hello("c", S1), Hello("c", S1)], InvalidArgument, "command.hello"),
    ],
)
async def test_what_is_no_session_is_refused_by_name(
    hub: SessionHub, commands: list[Command | None], error: type[Exception], field: str
) -> None:
    c = Coordinator(hub)
    c.say(*commands)
    with pytest.raises(error) as refused:
        await asyncio.wait_for(c.task, 5)
    assert getattr(refused.value, "field", None) == field
    assert hub.num_sessions == 0


async def test_a_session_that_goes_unread_is_ended(
    hub: SessionHub, box: Mailbox[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_hub, "UNREAD_LIMIT_S", 0.05)
    c = Coordinator(hub)
    c.reading.clear()
    c.say(Hello("c", S1))
    await asyncio.wait_for(c.task, 5)
    assert box.take(0)[-1] == SessionClosed(S1)


async def test_a_session_with_too_much_pending_is_ended(
    hub: SessionHub, box: Mailbox[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_hub, "UNREAD_LIMIT_ITEMS", 100)
    c = Coordinator(hub)
    c.say(Hello("c", S1))
    await c.until_reports(1)
    c.reading.clear()
    hub.send(S1, Report(tokens=tuple(token(i) for i in range(101))))
    c.reading.set()
    await asyncio.wait_for(c.task, 5)
    assert box.take(0)[-1] == SessionClosed(S1)


async def test_the_keys_of_block_events_count_as_items_that_go_unread(
    hub: SessionHub, box: Mailbox[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_hub, "UNREAD_LIMIT_ITEMS", 100)
    c = Coordinator(hub)
    c.say(Hello("c", S1))
    await c.until_reports(1)
    keys = tuple(BlockKey(bytes([i]) * 32) for i in range(60))
    first, second = (BlockEvents(at, (BlockRun(BlockEventKind.STORED, keys),)) for at in (1, 61))
    hub.send(S1, Report(block_events=(first,)))
    assert (await c.until_reports(2))[1].block_events == (first,)
    assert hub.num_sessions == 1
    hub.send(S1, Report(block_events=(first, second)))
    await asyncio.wait_for(c.task, 5)
    assert box.take(0)[-1] == SessionClosed(S1)


async def test_cancelling_the_call_ends_the_session_and_leaves_no_task(hub: SessionHub, box: Mailbox[Event]) -> None:
    before = len(asyncio.all_tasks())
    c = Coordinator(hub)
    c.say(Hello("c", S1))
    await c.until_reports(1)
    c.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await c.task
    assert box.take(0)[-1] == SessionClosed(S1)
    assert len(asyncio.all_tasks()) == before


async def test_a_worker_that_goes_says_what_is_left_to_say_first(hub: SessionHub) -> None:
    c = Coordinator(hub)
    c.say(Hello("c", S1))
    await c.until_reports(1)
    hub.send(S1, Report(tokens=(token(0),)))
    hub.end_all("the worker is stopping")
    await asyncio.wait_for(c.task, 5)
    assert [t.index for r in c.reports for t in r.tokens] == [0]
    assert hub.num_sessions == 0


async def test_last_words_that_nobody_reads_hold_up_nobody(hub: SessionHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_hub, "LAST_WORDS_S", 0.05)
    c = Coordinator(hub)
    c.say(Hello("c", S1))
    await c.until_reports(1)
    c.reading.clear()
    hub.send(S1, Report(tokens=(token(0),)))
    hub.end_all("the worker is stopping")
    await asyncio.wait_for(c.task, 5)


async def test_an_unread_report_is_not_blamed_for_our_own_pause(
    hub: SessionHub, box: Mailbox[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock jumps by a minute, as after SIGSTOP: the window begins anew."""
    jump = 0.0
    monotonic = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + jump)
    c = Coordinator(hub)
    c.say(Hello("c", S1))
    await c.until_reports(1)
    c.reading.clear()
    hub.send(S1, Report(tokens=(token(0),)))
    await asyncio.sleep(0.3)  # the report is being written, and was looked at
    jump = 60.0
    await asyncio.sleep(0.6)  # two looks more
    assert hub.num_sessions == 1
    c.reading.set()
    await c.until_reports(2)
    c.say(None)
    await asyncio.wait_for(c.task, 5)


@pytest.mark.parametrize("point", ["worker.command", "worker.report"])
async def test_a_session_ends_with_any_of_its_loops(hub: SessionHub, box: Mailbox[Event], point: str) -> None:
    c = Coordinator(hub)
    c.say(Hello("c", S1))
    await c.until_reports(1)

    def raise_there(passed: str) -> None:
        if passed == point:
            raise fault_points.FaultInjected(point)

    fault_points.install(raise_there)
    try:
        c.say(Abort(RequestId("r"), 1))
        hub.send(S1, Report(tokens=(token(0),)))
        with pytest.raises(fault_points.FaultInjected):
            await asyncio.wait_for(c.task, 5)
    finally:
        fault_points.install(None)
    assert box.take(0)[-1] == SessionClosed(S1)
    assert hub.num_sessions == 0


async def test_a_session_whose_silence_nobody_measures_any_more_is_ended(
    hub: SessionHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(session: object, now: float) -> None:
        raise RuntimeError("the watch died")

    monkeypatch.setattr(session_hub._Session, "check", broken)
    c = Coordinator(hub)
    c.say(Hello("c", S1))
    with pytest.raises(RuntimeError, match="the watch died"):
        await asyncio.wait_for(c.task, 5)
