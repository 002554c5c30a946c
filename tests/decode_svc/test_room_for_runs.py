"""Tickets and running sequences share one pool: what a running sequence is about to need is not promised away."""

from __future__ import annotations

from support.pair import Pair
from support.pair_requests import hash_reference, make_work


def test_a_reserve_that_would_take_a_running_sequences_next_block_waits() -> None:
    pair = Pair(decode_blocks=4)
    running = pair.submit(make_work("running", 10, 20))  # one block now, a second one at token 16
    while not pair.decode_steps:
        pair.turn()
    waiting = pair.submit(make_work("waiting", 40, 2))  # three blocks: as many as are free
    pair.turn()
    counts = pair.d_pool.counts()
    assert (counts.free, counts.held, counts.reserved) == (3, 1, 0)
    assert pair.decode.load(pair.now).waiting == 1
    while not running.ended:
        pair.turn()
        assert not pair.d_pool.counts().reserved or running.ended
    pair.run()
    assert [tuple(r.tokens) for r in (running, waiting)] == [hash_reference(r.work) for r in (running, waiting)]
    assert pair.counters(pair.decode)["preempted"] == 0
    pair.close()
