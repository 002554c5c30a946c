"""What the coordinator keeps about a worker: silence, unsent commands, load. All pure."""

from __future__ import annotations

import asyncio

import pytest

from coordinator.loads import WorkerLoad
from coordinator.outbox import CommandOutbox
from coordinator.stream import ITEM_BYTES, LOGPROB_BYTES, ErrorItem, StreamBuffer, TokenItem
from coordinator.views import Share
from kvrelay.blocks import BlockCounts, KVLayout
from kvrelay.errors import ResourceExhausted
from kvrelay.requests import Incarnation, Logprobs, RequestId, Role, Sampling, StopRule, WorkerId
from kvrelay.session import (
    Abort,
    Command,
    Heartbeat,
    Load,
    ModelIdentity,
    Prefill,
    Reserve,
    Start,
    Work,
    WorkerDescription,
)

A, B = RequestId("a"), RequestId("b")


def work(request_id: RequestId = A, attempt: int = 0) -> Work:
    return Work(request_id, attempt, (1, 2), 2, Sampling(), StopRule(3))


def drained(*commands: Command) -> list[Command]:
    outbox = CommandOutbox()
    for command in commands:
        outbox.put(command)
    return [outbox.pop() for _ in range(len(outbox))]


def test_an_abort_takes_the_unsent_commands_of_its_attempt_with_it() -> None:
    assert drained(Reserve(work(A)), Heartbeat(1, 0.0), Reserve(work(B)), Abort(A, 0)) == [
        Heartbeat(1, 0.0),
        Reserve(work(B)),
    ]
    assert drained(Prefill(work(A), None), Abort(A, 0)) == []


def test_an_abort_of_what_was_sent_overtakes_what_was_not() -> None:
    assert drained(Heartbeat(1, 0.0), Reserve(work(B)), Start(A, 0, (5,)), Abort(A, 0)) == [
        Abort(A, 0),
        Heartbeat(1, 0.0),
        Reserve(work(B)),
    ]


def test_an_abort_of_one_sequence_follows_what_is_unsent_of_its_attempt_and_overtakes_all_else() -> None:
    start, one = Start(A, 0, (5, 6)), Abort(A, 0, 1)
    assert drained(Heartbeat(1, 0.0), start, Reserve(work(B)), one) == [Heartbeat(1, 0.0), start, Reserve(work(B)), one]
    assert drained(Heartbeat(1, 0.0), Reserve(work(B)), one) == [one, Heartbeat(1, 0.0), Reserve(work(B))]
    assert drained(start, one, Abort(A, 0)) == [Abort(A, 0)]


def test_an_abort_leaves_other_attempts_alone() -> None:
    assert drained(Reserve(work(A, 1)), Abort(A, 0)) == [Abort(A, 0), Reserve(work(A, 1))]


def description(role: Role) -> WorkerDescription:
    layout = KVLayout(1, 1, 16, 4, "uint8")
    model = ModelIdentity("m", "f", 10, 100)
    return WorkerDescription(
        WorkerId("w"), role, Incarnation("i"), 1, "h:1", model, layout, 100, "grpc", "hash", 8, 512
    )


def load(queued: int = 0, free: int = 50, running: int = 0, draining: bool = False) -> Load:
    return Load(BlockCounts(100, free), running=running, queued_tokens=queued, draining=draining)


def test_a_prompt_counts_on_top_of_the_report_until_two_loads_came_after_it_was_sent() -> None:
    w = WorkerLoad(description(Role.PREFILL))
    assert not w.prefill_view(False).usable
    w.reported(load(queued=0))
    w.assign(A, Share(1000, 300), 1)
    w.sent(A)
    seen = [w.prefill_view(False).queued_tokens]
    for queued in (0, 300, 250):
        w.reported(load(queued=queued))
        seen.append(w.prefill_view(False).queued_tokens)
    assert seen == [300, 300, 300, 250]
    w.release(A)
    assert w.prefill_view(False).ticketed_tokens == 0


def test_a_prompt_that_the_worker_has_not_looked_for_in_its_cache_counts_with_what_is_uncached() -> None:
    w = WorkerLoad(description(Role.PREFILL))
    w.assign(A, Share(1000, 90), 1)
    w.assign(B, Share(500, 500), 2)
    for request in (A, B):
        w.sent(request)
    seen = []
    for queued in (0, 1000, 1500, 590, 100, 1900):
        w.reported(load(queued=queued))
        seen.append(w.prefill_view(False).queued_tokens)
    assert seen == [590, 590, 590, 590, 100, 400 + 590]


def test_what_other_coordinators_sent_counts_for_the_choice_but_not_against_our_budget() -> None:
    w = WorkerLoad(description(Role.PREFILL))
    w.reported(load(queued=900))
    view = w.prefill_view(False)
    assert (view.queued_tokens, view.ticketed_tokens) == (900, 0)


def test_a_reservation_counts_until_it_is_answered() -> None:
    w = WorkerLoad(description(Role.DECODE))
    w.reported(load(free=50, running=2))
    w.assign(A, Share(31), 1)
    w.assign(B, Share(32), 2)
    view = w.decode_view(False)
    assert (view.free_blocks, view.sequences, view.last_assigned) == (50 - 2 - 3, 4, 2)
    w.answered(A)
    assert w.decode_view(False).free_blocks == 50 - 3


def test_a_reservation_of_several_sequences_counts_each_and_what_decode_computes_itself_waits_there() -> None:
    w = WorkerLoad(description(Role.DECODE))
    w.reported(Load(BlockCounts(100, 30, cached=20), running=2, queued_tokens=2))
    w.assign(A, Share(31, to_compute=15, num_sequences=4), 1)
    view = w.decode_view(False)
    assert (view.free_blocks, view.cached_blocks, view.sequences, view.queued_tokens) == (50 - 2 - 3, 20, 6, 17)
    assert (view.occupancy, view.filled) == pytest.approx((0.55, 0.75))
    w.answered(A)
    view = w.decode_view(False)
    assert (view.free_blocks, view.sequences, view.queued_tokens) == (50, 2, 2)


def test_a_prefill_pool_is_filled_by_what_is_cached_as_well() -> None:
    w = WorkerLoad(description(Role.PREFILL))
    w.reported(Load(BlockCounts(100, 30, held=50, cached=20)))
    assert w.prefill_view(False).filled == pytest.approx(0.7)


def test_silent_and_draining_workers_are_not_usable() -> None:
    w = WorkerLoad(description(Role.DECODE))
    w.reported(load())
    assert (w.decode_view(False).usable, w.decode_view(True).usable) == (True, False)
    w.reported(load(draining=True))
    assert not w.decode_view(False).usable


def test_a_prefill_worker_that_drains_leaves_and_one_that_is_silent_does_not() -> None:
    w = WorkerLoad(description(Role.PREFILL))
    w.reported(load())
    views = [w.prefill_view(False), w.prefill_view(True), w.prefill_view(False, leaving=True)]
    w.reported(load(draining=True))
    views.append(w.prefill_view(False))
    assert [view.usable for view in views] == [True, False, False, False]
    assert [view.leaving for view in views] == [False, False, True, True]


async def test_a_buffer_says_when_its_reader_is_too_slow() -> None:
    stream = StreamBuffer(2 * ITEM_BYTES)
    assert [stream.put(TokenItem(i, 1, "", 0.0)) for i in range(3)] == [True, True, False]
    await stream.take()
    assert stream.put(ErrorItem(ResourceExhausted("x")))
    assert [type(await stream.take()) for _ in range(3)] == [TokenItem, TokenItem, ErrorItem]


async def test_logprobs_count_towards_what_waits_and_are_given_back_when_taken() -> None:
    item = TokenItem(0, 1, "ab", 0.0, logprobs=Logprobs(-0.5, ((1, -0.5), (2, -1.5))))
    assert item.num_bytes == ITEM_BYTES + 2 + 3 * LOGPROB_BYTES
    stream = StreamBuffer(item.num_bytes)
    for _ in range(3):
        assert stream.put(item)
        assert await stream.take() is item
    assert [stream.put(item), stream.put(item)] == [True, False]


async def test_a_reader_that_waits_is_woken_by_what_is_put() -> None:
    stream = StreamBuffer(1000)
    waiting = asyncio.ensure_future(stream.take())
    await asyncio.sleep(0)
    stream.put(TokenItem(0, 1, "a", 0.0))
    stream.put(TokenItem(1, 2, "b", 0.0))
    assert (await waiting).index == 0  # type: ignore[union-attr]  # a TokenItem
    assert (await stream.take()).index == 1  # type: ignore[union-attr]  # a TokenItem
