"""The whole coordinator over real gRPC while fake workers die, break and come back: one exact stream or one status."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from support.door import Answer, Door, Pairs, held, until
from support.fake_workers import FakeWorker
from support.lifecycles import TICKET

from coordinator.admission import NO_WORKER_GRACE_S
from kvrelay.errors import Aborted, Internal, Unavailable
from kvrelay.requests import RequestId, Role
from kvrelay.session import Abort, Ended, Prefill, Refused, Report, Reserve, Reserved, Start


def letters(count: int) -> list[int]:
    """What fake workers say, by index."""
    return [97 + i % 26 for i in range(count)]


def assert_whole(answer: Answer, count: int, migrations: int) -> None:
    """All tokens once and in order (Answer checks the indexes), counted once, ended once."""
    assert answer.error is None
    assert answer.ids == letters(count)
    assert answer.finished is not None
    assert (answer.finished.usage.completion_tokens, answer.finished.reason) == (count, 2)
    assert answer.finished.migrations == migrations


@pytest.mark.parametrize("k", [0, 1, 15, 16, 17])
async def test_decode_dies_after_k_tokens_and_the_stream_goes_on_with_them(door: Door, pairs: Pairs, k: int) -> None:
    p0, p1, d0, d1 = pairs
    held(p0, "token0") if k == 0 else held(d0, f"token {k}")
    answer, asked = door.begin(text="hello", max_tokens=20, sampling={"seed": 7})
    await until(lambda: d0.commands(Reserve) and p0.commands(Prefill) and len(answer.tokens) == k)
    await d0.die()
    assert_whole(await asked, 20, migrations=1)
    assert answer.finished is not None
    assert (answer.finished.prefill_worker, answer.finished.decode_worker) == ("p1", "d1")
    assert answer.finished.hand_off.num_blocks == (5 + k + 15) // 16
    (again,) = d1.commands(Reserve)
    assert (again.work.attempt, again.work.num_prompt_tokens) == (1, 5)
    assert again.work.token_ids == (*b"hello", *letters(k))
    assert (again.work.sampling.seed, again.work.stop.max_tokens) == (7, 20)
    assert p1.commands(Prefill)[0].work == again.work
    assert d1.commands(Start)[0].first_tokens == (97 + k,)
    assert (door.counters["migrated"], door.counters["migrated.worker_lost"]) == (1, 1)
    assert door.counters["tokens"] == 20
    assert [c.attempt for c in p0.commands(Abort)] == ([0] if k == 0 else [])
    await door.idle()


async def test_a_stop_string_over_the_cut_ends_the_stream(door: Door, pairs: Pairs) -> None:
    d0 = pairs[2]
    held(d0, "token 4")
    answer, asked = door.begin(text="q", max_tokens=20, stop=["cdefg"])
    await until(lambda: len(answer.tokens) == 4)
    await d0.die()
    await asked
    assert (answer.error, answer.ids, answer.text) == (None, letters(7), "ab")
    assert answer.finished is not None
    assert (answer.finished.reason, answer.finished.usage.completion_tokens) == (1, 7)
    await until(lambda: pairs[3].commands(Abort))


async def test_the_last_token_of_a_moved_stream_needs_no_decode_worker(door: Door, pairs: Pairs) -> None:
    _, p1, d0, d1 = pairs
    held(d0, "token 4")
    answer, asked = door.begin(text="q", max_tokens=5)
    await until(lambda: len(answer.tokens) == 4)
    await d0.die()
    assert_whole(await asked, 5, migrations=1)
    assert answer.finished is not None
    assert (answer.finished.decode_worker, answer.finished.HasField("hand_off")) == ("", False)
    assert (d1.commands(Reserve), p1.commands(Prefill)[0].destination) == ([], None)


async def test_prefill_dies_in_the_middle_of_a_prompt(door: Door, pairs: Pairs) -> None:
    p0, _, d0, _ = pairs
    held(p0, "token0")
    _, asked = door.begin(text="hello", max_tokens=5)
    await until(lambda: p0.commands(Prefill))
    await p0.die()
    assert_whole(await asked, 5, migrations=1)
    assert [c.attempt for c in d0.commands(Abort)] == [0]


@pytest.mark.parametrize("landed", [True, False])
async def test_prefill_dies_after_its_token_and_decode_is_asked_first(door: Door, pairs: Pairs, landed: bool) -> None:
    p0, _, d0, d1 = pairs
    held(p0, "landed")
    held(d0, "decode")
    answer, asked = door.begin(text="hello", max_tokens=5)
    await until(lambda: d0.commands(Start))
    await p0.die()
    await until(lambda: door.counters["checked_back"] == 1)
    assert (d0.commands(Abort), d1.commands(Reserve)) == ([], [])
    if landed:
        d0.let_go("decode")
    assert_whole(await asked, 5, migrations=0 if landed else 1)
    assert answer.finished is not None
    assert answer.finished.decode_worker == ("d0" if landed else "d1")
    assert len(d0.commands(Abort)) == (0 if landed else 1)
    await door.idle()


async def test_decode_that_says_its_writer_is_gone_is_left_at_once(door: Door, pairs: Pairs) -> None:
    p0, _, d0, _ = pairs
    held(p0, "landed")
    held(d0, "decode")
    _, asked = door.begin(text="hello", max_tokens=5)
    await until(lambda: d0.commands(Start))
    await p0.die()
    await until(lambda: door.counters["checked_back"] == 1)
    request_id = d0.commands(Start)[0].request_id
    d0.say(Report(ended=(Ended(request_id, 0, 0, "failed", "Unavailable", "the writer is gone"),)))
    assert_whole(await asked, 5, migrations=1)
    assert door.counters["migrated.worker_failed"] == 1
    assert d0.commands(Abort) == []


@pytest.mark.parametrize("door", [{"max_attempts": 3}], indirect=True)
async def test_attempts_are_bounded_and_the_end_names_count_and_worker(door: Door, pairs: Pairs) -> None:
    for worker in pairs[2:]:
        worker.refuse = Refused(RequestId(""), 0, "Unavailable", "draining")
    answer = await door.ask(text="x", max_tokens=3)
    assert type(answer.error) is Aborted
    assert answer.error.message.startswith("attempts used up (3); the last one: decode worker d")
    assert door.counters["attempts_used_up"] == 1
    assert door.counters["migrated.worker_not_taking"] == 2
    assert len(pairs[2].commands(Reserve)) + len(pairs[3].commands(Reserve)) == 3


async def test_an_end_that_would_come_again_is_not_tried_again(door: Door, pairs: Pairs) -> None:
    d0 = pairs[2]
    held(d0, "token 2")
    answer, asked = door.begin(text="x", max_tokens=9)
    await until(lambda: len(answer.tokens) == 2)
    d0.say(Report(ended=(Ended(d0.commands(Start)[0].request_id, 0, 0, "failed", "Internal", "a bug"),)))
    assert type((await asked).error) is Internal
    assert pairs[3].commands(Reserve) == []


BREAKS = {"before send": "", "after send, before reply": "reserve", "mid-stream": "token 5"}


@pytest.mark.parametrize("when", BREAKS)
async def test_a_broken_link_to_a_living_worker_gives_one_result_billed_once(
    door: Door, pair: tuple[FakeWorker, FakeWorker], when: str
) -> None:
    """The same worker is used again over a new session; what it still says of the old attempt counts for nothing."""
    decode, step = pair[1], BREAKS[when]
    if step:
        held(decode, step)
    else:
        decode.break_sessions()
    answer, asked = door.begin(text="hello", max_tokens=9)
    if step:
        await until(lambda: decode.commands(Reserve) and (step == "reserve" or len(answer.tokens) == 5))
        decode.break_sessions()
        await until(lambda: len(decode.commands(Reserve)) == 2)
        decode.let_go(step)  # the old attempt goes on at the worker, into the new session
    assert_whole(await asked, 9, migrations=door.counters["migrated"])
    heard_of = [c.work.attempt for c in decode.commands(Reserve)]
    assert heard_of == [0, 1] if step else heard_of in ([0], [1])
    assert (door.counters["tokens"], door.counters["outcome.length"]) == (9, 1)
    assert door.counters["outcome.Cancelled"] == 0
    await door.idle()


@pytest.mark.parametrize("door", [{"max_attempts": 2}], indirect=True)
async def test_a_worker_that_raises_in_mid_stream_200_times(door: Door, pair: tuple[FakeWorker, FakeWorker]) -> None:
    """20 streams, their worker's session breaks under them again and again: each gets one status, the loop no error."""
    decode, raised = pair[1], list[dict[str, Any]]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: raised.append(context))
    for step in ("token 2", "token 3"):
        held(decode, step)
    for _ in range(5):
        begun = [door.begin(text="x" * (i + 1), max_tokens=9) for i in range(20)]
        for _ in range(2):
            await until(lambda: len(decode.commands(Start)) == 20, 10.0)
            decode.got.clear()
            decode.break_sessions()
        answers = await asyncio.gather(*(task for _, task in begun))
        assert [type(a.error) for a in answers] == [Aborted] * 20
        assert all(a.finished is None and a.ids == letters(len(a.ids)) for a in answers)
        await door.idle()
    assert (door.counters["attempts_used_up"], door.counters["migrated"]) == (100, 100)
    assert raised == []


async def test_a_lost_prefill_worker_that_nobody_replaces_leaves_decode_to_go_on_alone(
    door: Door, pair: tuple[FakeWorker, FakeWorker]
) -> None:
    prefill, decode = pair
    held(prefill, "landed")
    held(decode, "decode")
    _, asked = door.begin(text="x", max_tokens=4)
    await until(lambda: decode.commands(Start))
    await prefill.die()
    await until(lambda: len(decode.commands(Reserve)) == 2)
    assert decode.commands(Reserve)[1].local_prefill
    decode.let_go("decode")
    answer = await asked
    assert_whole(answer, 4, migrations=1)
    assert answer.finished is not None
    assert (answer.finished.prefill_worker, answer.finished.decode_worker) == ("", "d0")
    assert not answer.finished.HasField("hand_off")
    assert len(decode.commands(Start)) == 1
    assert_whole(await door.ask(text="late", max_tokens=2), 2, migrations=0)


@pytest.mark.parametrize("how", ["dies", "falls silent"])
async def test_a_lost_decode_worker_that_nobody_replaces_ends_its_requests_unavailable_after_the_grace(
    door: Door, pair: tuple[FakeWorker, FakeWorker], how: str
) -> None:
    prefill, decode = pair
    held(prefill, "landed")
    held(decode, "decode")
    answer, asked = door.begin(text="x")
    await until(lambda: decode.commands(Start))
    began = time.monotonic()
    if how == "dies":
        await decode.die()
    else:
        decode.silent = True
    await asked
    assert isinstance(answer.error, Unavailable)
    assert answer.error.message == "no decode worker is left: decode worker d0 was lost"
    assert answer.error.retry_after_s == 1.0
    assert NO_WORKER_GRACE_S <= time.monotonic() - began < (5.5 if how == "dies" else 8.5)
    assert answer.ids == [97]
    await until(lambda: prefill.commands(Abort))
    await door.idle()
    assert isinstance((await door.ask(text="late")).error, Unavailable)


async def test_a_restart_within_the_grace_fails_no_request_old_or_new(
    door: Door, pair: tuple[FakeWorker, FakeWorker]
) -> None:
    decode = pair[1]
    held(decode, "token 3")
    answer, asked = door.begin(text="old", max_tokens=9)
    await until(lambda: len(answer.tokens) == 3)
    await decode.die()
    await until(lambda: door.coordinator.dispatcher.num_queued == 1)
    _, late = door.begin(text="new", max_tokens=4)
    await until(lambda: door.coordinator.dispatcher.num_queued == 2)
    async with FakeWorker(Role.DECODE, "d0", life="two") as again:
        await again.announce_to(door.address)
        assert_whole(await asked, 9, migrations=1)
        assert_whole(await late, 4, migrations=0)
        # The moved one waits 20 ms before it is placed anew; the new one may pass it meanwhile.
        assert sorted(len(c.work.token_ids) for c in again.commands(Reserve)) == [3, 6]


async def test_an_answer_to_an_older_attempt_says_nothing_of_a_workers_load(
    door: Door, pair: tuple[FakeWorker, FakeWorker]
) -> None:
    prefill, decode = pair
    held(decode, "reserve")
    _, asked = door.begin(text="x", max_tokens=3)
    await until(lambda: decode.commands(Reserve))
    request_id = decode.commands(Reserve)[0].work.request_id
    decode.say(Report(ended=(Ended(request_id, 0, 0, "failed", "Unavailable", "x"),)))
    await until(lambda: len(decode.commands(Reserve)) == 2)
    load = door.coordinator.roster._loads[door.coordinator.roster.listing()[0][0].worker_id]
    assert [a.loads_left for a in load._assigned.values()] == [None]
    ticket = Reserved(request_id, 0, TICKET)
    decode.say(Report(reserved=(ticket,)))
    await until(lambda: door.counters["dropped.ReservedBy"] == 1)
    assert [a.loads_left for a in load._assigned.values()] == [None]
    decode.let_go("reserve")
    assert_whole(await asked, 3, migrations=1)
    assert prefill.commands(Prefill)[0].work.attempt == 1


async def test_a_worker_that_moves_to_another_address_in_one_life_is_used_there_from_then_on(
    door: Door, pair: tuple[FakeWorker, FakeWorker]
) -> None:
    """Its old address still answers heartbeats: that is no reason to stay with it."""
    prefill, old = pair
    held(old, "token 3")
    answer, asked = door.begin(text="hello", max_tokens=6)
    await until(lambda: len(answer.tokens) == 3)
    async with FakeWorker(Role.DECODE, "d0") as new:
        await new.announce_to(door.address)
        assert_whole(await asked, 6, migrations=1)
        for _ in range(10):
            assert_whole(await door.ask(text="hello", max_tokens=4), 4, migrations=0)
        assert len(new.commands(Reserve)) == 11
        assert len(old.commands(Reserve)) == 1
        later = [command.destination.address for command in prefill.commands(Prefill)[1:]]
        assert later == [new.address] * 11
        await door.idle()
