"""Between two turns of an engine what waits in the mailbox is handled, before time is held against anyone."""

from __future__ import annotations

from support.pair import D, Pair
from support.pair_requests import make_work

from kvrelay.link import LEASE_S, Renew, Renewed
from kvtransfer.actions import ExitProcess, Send
from kvtransfer.transports.base import WriteDone
from kvtransfer.writer import WriterState
from kvtransfer.writer_ticket import LINK_LOST_EXIT_S
from worker.events import FromDecode, LinkClosed, TransportHappened


def writing_as_its_link_breaks() -> Pair:
    """A write of "one" is under way, and there is more to compute; prefill has just heard that the link is lost."""
    pair = Pair()
    pair.drop_parts.add(0)
    pair.submit(make_work("one", 40, 8))
    for _ in range(20):
        pair.turn()
    assert pair.prefill.load(pair.now).transfers_in_flight == 1
    pair.submit(make_work("two", 200, 1))
    while not pair.prefill.load(pair.now).queued_tokens > 64:
        pair.turn()
    pair.prefill.handle(LinkClosed(D, by_kernel=False), pair.now)
    return pair


def test_no_step_begins_while_a_write_might_outlive_its_link() -> None:
    """Decode takes the end of the link for our death, and a step of two seconds would put that off too long."""
    pair = writing_as_its_link_breaks()
    try:
        assert pair.prefill.schedule(pair.now) is None
        assert not [a for a in pair.prefill.actions(pair.now) if isinstance(a, ExitProcess)]
        wakes_at = pair.prefill.next_wake()
        assert wakes_at is not None and wakes_at <= pair.now + LINK_LOST_EXIT_S
        pair.now += LINK_LOST_EXIT_S
        assert pair.prefill.schedule(pair.now) is None
        assert [a for a in pair.prefill.actions(pair.now) if isinstance(a, ExitProcess)]
    finally:
        pair.close()


def test_with_the_end_of_that_write_computing_goes_on() -> None:
    pair = writing_as_its_link_breaks()
    try:
        assert pair.prefill.schedule(pair.now) is None
        pair.now += LINK_LOST_EXIT_S
        pair.prefill.handle(TransportHappened(WriteDone(D, 1, 0, 0.1)), pair.now)
        plan = pair.prefill.schedule(pair.now)
        assert plan is not None
        assert not [a for a in pair.prefill.actions(pair.now) if isinstance(a, ExitProcess)]
        pair.prefill.apply(plan, pair.p_exec.run(plan), pair.now)
    finally:
        pair.close()


def test_a_lease_whose_renewal_came_while_a_step_ran_is_no_lost_one() -> None:
    pair = Pair()
    try:
        pair.submit(make_work("long", 640, 8))
        for _ in range(4):
            pair.turn()
        asked_at = pair.now = pair.now + LEASE_S / 3
        pair.prefill.schedule(asked_at)
        (renew,) = [a for a in pair.prefill.actions(asked_at) if isinstance(a, Send)]
        plan = pair.prefill._p.scheduler._plan
        assert (renew.message, plan is None) == (Renew(1), False)
        assert plan is not None
        result = pair.p_exec.run(plan)
        pair.now += LEASE_S - 2.0
        pair.prefill.apply(plan, result, pair.now)
        pair.prefill.actions(pair.now)
        pair.prefill.handle(FromDecode(D, Renewed(1, LEASE_S)), pair.now)
        pair.prefill.schedule(pair.now)
        pair.prefill.actions(pair.now)
        assert pair.writer.counts()[WriterState.OPEN] == 1
    finally:
        pair.close()


def test_a_decode_worker_whose_blocks_are_promised_to_tickets_waits_and_is_not_stuck() -> None:
    pair = Pair(decode_blocks=8)
    try:
        pair.submit(make_work("runs", 10, 100))
        while not pair.decode.load(pair.now).running:
            pair.turn()
        pair.drop_parts.add(0)
        pair.submit(make_work("waits", 90, 8))
        for _ in range(60):
            pair.turn()
        load = pair.decode.load(pair.now)
        assert (load.running, load.blocks.free) == (1, 0)
        assert load.blocks.reserved == 6
        pair.now += 60.0
        assert pair.decode.stuck_s(pair.now) == 0.0
    finally:
        pair.close()
