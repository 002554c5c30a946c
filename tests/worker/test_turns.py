"""Between two turns of an engine what waits in the mailbox is handled, before time is held against anyone."""

from __future__ import annotations

from support.pair import D, Pair
from support.pair_requests import make_work

from kvtransfer.actions import ExitProcess
from worker.events import LinkClosed


def test_a_write_that_ended_while_a_step_ran_is_not_taken_for_one_that_outlived_its_link() -> None:
    """Decode dies with a write under way; the end of that write comes during a long step of prefill."""
    pair = Pair()
    try:
        pair.drop_parts.add(0)
        pair.submit(make_work("one", 40, 8))
        for _ in range(20):
            pair.turn()
        assert pair.prefill.load(pair.now).transfers_in_flight == 1
        pair.submit(make_work("two", 200, 1))
        while not pair.prefill.load(pair.now).queued_tokens > 64:
            pair.turn()
        pair.prefill.handle(LinkClosed(D, by_kernel=False), pair.now)
        plan = pair.prefill.schedule(pair.now)
        assert plan is not None
        result = pair.p_exec.run(plan)
        pair.now += 1.5
        pair.prefill.apply(plan, result, pair.now)
        assert not [a for a in pair.prefill.actions(pair.now) if isinstance(a, ExitProcess)]
        pair.prefill.schedule(pair.now)
        assert [a for a in pair.prefill.actions(pair.now) if isinstance(a, ExitProcess)]
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
