"""The times that keep a hand-off safe, in seconds as docs/hand-off.md gives them: other tests use them by name."""

from __future__ import annotations

from handoff_values import BLOCK_BYTES, DECODE, PREFILL, key_of, prompt_tokens, ticket_of

from kvrelay.link import Opened, OpenTicket
from kvtransfer.actions import Count, ExitProcess, FreeBlocks, Unexpect
from kvtransfer.receiver import ReceiverTable
from kvtransfer.writer import WriterTable

T = ticket_of(epoch=1)
FREED = (Unexpect(1), FreeBlocks(1, (10, 11, 12, 13)))


def receiving() -> ReceiverTable:
    """Opened at 0."""
    t = ReceiverTable(DECODE, BLOCK_BYTES)
    t.reserve(T, prompt_tokens(T), key_of(), 0.0)
    t.open(PREFILL, OpenTicket(1, DECODE, key_of().request_id, 1), 0.0)
    return t


def writing() -> WriterTable:
    """One part posted at 0 under a lease of 15 s."""
    t = WriterTable(PREFILL, BLOCK_BYTES)
    t.link_opened(DECODE, 0.0)
    t.start(T, DECODE, key_of(), prompt_tokens(T), 0.0)
    t.opened(DECODE, Opened(1, 15.0), 0.0)
    assert len(t.part_ready(DECODE, 1, (0,), (100,), False, 0.0)) == 1
    return t


def test_a_lease_lasts_15_s_and_blocks_of_a_lost_host_come_back_30_s_after_its_end() -> None:
    t = receiving()
    assert t.next_deadline() == 15.0
    t.tick(15.0)
    assert t.next_deadline() == 45.0
    assert t.tick(44.9) == ()
    assert t.tick(45.0) == (Count("forced"), *FREED)


def test_blocks_of_a_writer_that_died_come_back_3_s_after_its_link_closed() -> None:
    t = receiving()
    t.link_closed(PREFILL, True, 3.0)
    assert t.tick(5.9) == ()
    assert t.tick(6.0) == FREED


def test_a_writer_whose_write_outlives_its_link_is_gone_2200_ms_before_the_blocks_are_reused() -> None:
    t = writing()
    t.link_lost(DECODE, 3.0)
    assert t.tick(3.7) == ()
    assert [type(action) for action in t.tick(3.8)] == [ExitProcess]


def test_a_failed_write_is_held_against_a_peer_that_lives_2500_ms_longer() -> None:
    t = writing()
    t.write_failed(DECODE, 1, 0, "timeout", 2.0)
    assert t.tick(4.4) == ()
    assert [type(action) for action in t.tick(4.5)] == [ExitProcess]


def test_nothing_is_posted_in_the_last_second_of_a_lease() -> None:
    t = writing()
    assert len(t.part_ready(DECODE, 1, (1,), (101,), False, 13.9)) == 1
    assert t.part_ready(DECODE, 1, (2,), (102,), False, 14.0) == ()
