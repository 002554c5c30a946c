"""Writes that do not end though both workers live and the link does: the attempt is given up, then the process."""

from __future__ import annotations

from handoff_values import BLOCK_BYTES, DECODE, PREFILL, key_of, prompt_tokens, ticket_of

from kvrelay.blocks import Ticket
from kvrelay.link import LEASE_S, Fenced, LandedNotice, Opened, Renew, Renewed
from kvtransfer.actions import ExitProcess, Failed, Finished, Post, Send, WriterAction
from kvtransfer.writer import WriterState, WriterTable
from kvtransfer.writer_ticket import STUCK_WRITE_S

FIRST, SECOND = ticket_of(epoch=1, cached=1), ticket_of(epoch=2, cached=1)
STUCK = f"no write to the decode worker ended for {STUCK_WRITE_S:.0f} s"


def writing(refuses_late: bool = False) -> WriterTable:
    """Two tickets of one peer, open; from second 1 on one part of each is being written, as part 0."""
    table = WriterTable(PREFILL, BLOCK_BYTES, refuses_late=refuses_late)
    table.link_opened(DECODE, 0.0)
    for ticket in (FIRST, SECOND):
        start(table, ticket)
    return table


def start(table: WriterTable, ticket: Ticket, at: float = 0.0) -> None:
    table.start(ticket, DECODE, key_of(), prompt_tokens(ticket), at)
    table.received(DECODE, Opened(ticket.epoch, LEASE_S), at + 0.5)
    actions = table.part_ready(DECODE, ticket.epoch, (1,), (101,), False, at + 1.0)
    assert any(isinstance(action, Post) for action in actions)


def live_on(table: WriterTable, since: float, until: float) -> list[WriterAction]:
    """Ticks twice a second up to that time, that included; decode grants each renewal. What else was to be done."""
    others: list[WriterAction] = []
    for half_seconds in range(round(2 * since), round(2 * until) + 1):
        now = half_seconds / 2
        for action in table.tick(now):
            message = getattr(action, "message", None)
            if isinstance(message, Renew):
                table.received(DECODE, Renewed(message.epoch, LEASE_S), now)
            else:
                others.append(action)
    return others


def test_an_attempt_whose_write_does_not_end_fails_however_often_its_lease_is_renewed() -> None:
    table = writing()
    table.write_done(DECODE, 2, 0, 1.0)
    assert live_on(table, 1.0, 0.5 + STUCK_WRITE_S) == []
    assert live_on(table, 1.0 + STUCK_WRITE_S, 1.0 + STUCK_WRITE_S) == [Failed(key_of(), DECODE, 1, STUCK)]
    assert (table.state(DECODE, 1), table.state(DECODE, 2)) == (WriterState.CLOSING, WriterState.OPEN)


def test_the_process_ends_if_the_write_does_not_end_after_that_either() -> None:
    table = writing()
    assert [type(action) for action in live_on(table, 1.0, 0.5 + 2 * STUCK_WRITE_S)] == [Failed, Failed]
    (first, _) = live_on(table, 1.0 + 2 * STUCK_WRITE_S, 1.0 + 2 * STUCK_WRITE_S)
    assert isinstance(first, ExitProcess)


def test_a_write_that_stands_in_line_behind_others_to_the_same_peer_is_waited_for() -> None:
    table = writing()
    assert live_on(table, 1.0, 25.0) == []
    table.write_done(DECODE, 2, 0, 25.0)
    assert live_on(table, 25.5, 24.5 + STUCK_WRITE_S) == []
    assert live_on(table, 25.0 + STUCK_WRITE_S, 25.0 + STUCK_WRITE_S) == [Failed(key_of(), DECODE, 1, STUCK)]


def test_a_write_begins_its_time_when_it_is_posted() -> None:
    table = writing()
    for epoch in (1, 2):
        table.write_done(DECODE, epoch, 0, 1.5)
    assert live_on(table, 2.0, 90.0) == []
    table.part_ready(DECODE, 1, (2,), (102,), False, 90.0)
    assert live_on(table, 90.5, 89.5 + STUCK_WRITE_S) == []
    assert live_on(table, 90.0 + STUCK_WRITE_S, 90.0 + STUCK_WRITE_S) == [Failed(key_of(), DECODE, 1, STUCK)]


def test_what_was_given_up_and_waits_in_a_link_that_moves_ends_no_process() -> None:
    """A long prompt over a slow line, cancelled: its parts go out one after another, for longer than the bound."""
    table = writing(refuses_late=True)
    table.abort(DECODE, 1, 2.0)
    for now in (20.0, 40.0, 60.0):
        assert live_on(table, now - 19.5, now) == []
        table.write_done(DECODE, 2, 0, now)
    assert live_on(table, 60.0, 59.5 + STUCK_WRITE_S) == []
    (exits, *_) = live_on(table, 60.0 + STUCK_WRITE_S, 60.0 + STUCK_WRITE_S)
    assert isinstance(exits, ExitProcess)


def test_what_is_left_of_a_lost_link_and_goes_out_over_the_next_one_ends_no_process_while_that_moves() -> None:
    """The peer refuses it, so nothing is in danger; the line is slow, and what was posted cannot be taken back."""
    table = writing(refuses_late=True)
    table.link_lost(DECODE, 2.0)
    table.link_opened(DECODE, 2.5)
    table.write_done(DECODE, 2, 0, 25.0)
    assert live_on(table, 25.0, 24.5 + STUCK_WRITE_S) == []
    exits = live_on(table, 25.0 + STUCK_WRITE_S, 25.0 + STUCK_WRITE_S)
    assert [type(action) for action in exits] == [ExitProcess]


def test_a_one_sided_write_that_was_given_up_has_its_own_time_whatever_others_do() -> None:
    table = writing()
    table.abort(DECODE, 1, 2.0)
    table.write_done(DECODE, 2, 0, 20.0)
    assert live_on(table, 2.0, 1.5 + STUCK_WRITE_S) == []
    (exits,) = live_on(table, 2.0 + STUCK_WRITE_S, 2.0 + STUCK_WRITE_S)
    assert isinstance(exits, ExitProcess)


def test_what_is_written_and_never_landed_is_given_up() -> None:
    """As if a manifest were lost, or decode's transport read none."""
    table = writing()
    table.part_ready(DECODE, 1, (2, 3), (102, 103), True, 2.0)
    table.write_done(DECODE, 1, 1, 3.0)
    table.write_done(DECODE, 1, 0, 5.0)
    for half_minute in (30.0, 60.0):  # another one's writes prove nothing for it
        table.write_done(DECODE, 2, 0, half_minute)
    assert live_on(table, 5.0, 4.5 + STUCK_WRITE_S) == []
    words = "all was written 30 s ago and the decode worker has not all of it"
    at = 5.0 + STUCK_WRITE_S
    assert live_on(table, at, at) == [Failed(key_of(), DECODE, 1, words), Send(DECODE, Fenced(1))]
    assert table.state(DECODE, 1) is None


def test_a_prompt_that_takes_long_between_two_parts_is_waited_for() -> None:
    table = writing()
    for epoch in (1, 2):
        table.write_done(DECODE, epoch, 0, 2.0)
    assert live_on(table, 2.0, 300.0) == []
    assert table.state(DECODE, 1) is WriterState.OPEN


def test_a_ticket_that_is_opened_late_with_nothing_to_write_has_time_to_land() -> None:
    table = WriterTable(PREFILL, BLOCK_BYTES)
    table.link_opened(DECODE, 1000.0)
    ticket = ticket_of(epoch=1, cached=4)
    table.start(ticket, DECODE, key_of(), 64, 1000.0)
    table.received(DECODE, Opened(1, LEASE_S), 1000.5)
    assert live_on(table, 1000.5, 1001.0) == []
    (finished,) = table.received(DECODE, LandedNotice(1), 1001.0)
    assert isinstance(finished, Finished)


def test_no_tick_is_asked_for_that_would_change_nothing() -> None:
    """The engine would turn without a pause."""
    table = writing(refuses_late=True)
    table.abort(DECODE, 1, 2.0)
    live_on(table, 1.5, 25.0)
    table.write_done(DECODE, 2, 0, 25.0)
    live_on(table, 25.0, 50.0)
    due = table.next_deadline()
    assert due is not None
    assert due > 50.0
    table.link_lost(DECODE, 50.5)
    table.write_done(DECODE, 2, 0, 70.0)
    assert live_on(table, 70.0, 69.5 + STUCK_WRITE_S) == []
    due = table.next_deadline()
    assert due is None or due > 69.5 + STUCK_WRITE_S
