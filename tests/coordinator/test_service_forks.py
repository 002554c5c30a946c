"""The whole coordinator over real gRPC with fake workers, asked for n sequences: one prompt, n answers, one stream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from support.door import Answer, Door, Pairs, held, join, read_all, until
from support.fake_workers import FakeWorker

from kvrelay.errors import DeadlineExceeded, Internal, KVRelayError, Unavailable
from kvrelay.requests import RequestId, Role, Sampling
from kvrelay.rpc.convert import report_to_protos
from kvrelay.session import Abort, ComputeRecord, Ended, Landed, Prefill, Report, Reserve, Start, TokenOut
from kvrelay.v1 import inference_pb2

N = 4


class Many(Answer):
    """What a client saw of a call for several sequences, by sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.of = [Answer() for _ in range(N)]

    def take(self, message: inference_pb2.GenerateResponse) -> None:
        match message.WhichOneof("event"):
            case "accepted":
                self.accepted = message.accepted
            case "token":
                one = self.of[message.token.sequence]
                assert one.finished is None, "nothing comes after the finish of a sequence"
                one.take(message)
            case _:
                self.of[message.finished.sequence].take(message)

    @property
    def all_ids(self) -> list[list[int]]:
        return [one.ids for one in self.of]

    @property
    def num_tokens(self) -> list[int]:
        return [len(one.tokens) for one in self.of]

    @property
    def id(self) -> str:
        return self.accepted.request_id if self.accepted is not None else ""

    def finished_of(self, sequence: int) -> inference_pb2.Finished:
        finished = self.of[sequence].finished
        assert finished is not None
        return finished


def begin(door: Door, **fields: Any) -> tuple[Many, asyncio.Task[Answer]]:
    answer = Many()
    return answer, asyncio.ensure_future(read_all(door.call(n=N, text="hello", **fields), answer))


async def ask(door: Door, **fields: Any) -> Many:
    answer, asked = begin(door, **fields)
    await asked
    return answer


def letters(sequence: int, count: int) -> list[int]:
    """What fake workers say in one sequence."""
    return [97 + (i + sequence) % 26 for i in range(count)]


async def test_four_sequences_of_one_prompt_one_reserve_and_one_start(
    door: Door, pair: tuple[FakeWorker, FakeWorker]
) -> None:
    prefill, decode = pair
    prefill.cached_tokens = 3
    answer = await ask(door, max_tokens=5, sampling={"seed": 7}, prefix_cache=False)
    assert answer.error is None
    assert answer.all_ids == [letters(s, 5) for s in range(N)]
    assert [one.text for one in answer.of] == ["abcde", "bcdef", "cdefg", "defgh"]
    for s in range(N):
        finished = answer.finished_of(s)
        assert (finished.reason, finished.usage.prompt_tokens, finished.usage.completion_tokens) == (2, 5, 5)
        assert (finished.usage.cached_tokens, finished.migrations) == (3, 0)
        assert (finished.prefill_worker, finished.decode_worker) == ("p0", "d0")
        assert finished.hand_off.num_blocks == 1
    (reserve,), (sent,), (start,) = decode.commands(Reserve), prefill.commands(Prefill), decode.commands(Start)
    assert (reserve.work.n, reserve.work.prefix_cache, reserve.work.sampling.seed) == (N, False, 7)
    assert sent.work == reserve.work
    assert (start.request_id, start.attempt, start.first_tokens) == (answer.id, 0, (97, 98, 99, 100))
    assert decode.commands(Abort) == prefill.commands(Abort) == []
    await door.idle()
    assert (door.counters["started"], door.counters["forked"], door.counters["outcome.length"]) == (1, N, N)
    assert door.counters["tokens"] == 5 * N


async def test_sequences_that_end_with_their_first_token_each_in_its_way(
    door: Door, pair: tuple[FakeWorker, FakeWorker]
) -> None:
    """By EOS decode knows by itself, by a stop string it is told; the others go on."""
    prefill, decode = pair
    for worker in pair:
        worker.scripts = {1: [256], 2: [120, 121, 122, 123]}
    answer = await ask(door, max_tokens=4, stop=["x"])
    assert answer.error is None
    assert answer.all_ids == [letters(0, 4), [256], [120], letters(3, 4)]
    assert [one.text for one in answer.of] == ["abcd", "", "", "defg"]
    assert [answer.finished_of(s).reason for s in range(N)] == [2, 1, 1, 2]
    assert not answer.finished_of(1).HasField("hand_off")
    assert answer.finished_of(1).decode_worker == ""
    assert decode.commands(Abort) == [Abort(answer.id, 0, 2)]  # type: ignore[arg-type]  # a RequestId
    assert prefill.commands(Abort) == []


async def test_a_stop_string_later_ends_its_sequence_alone(door: Door, pair: tuple[FakeWorker, FakeWorker]) -> None:
    decode = pair[1]
    answer = await ask(door, max_tokens=20, stop=["cd"])
    assert answer.error is None
    assert [one.text for one in answer.of] == ["ab", "b", "", "defghijklmnopqrstuvw"]
    await until(lambda: len(decode.commands(Abort)) == 3)
    assert sorted(c.sequence for c in decode.commands(Abort)) == [0, 1, 2]


async def test_one_token_each_never_touches_decode(door: Door, pair: tuple[FakeWorker, FakeWorker]) -> None:
    answer = await ask(door, max_tokens=1)
    assert (answer.error, answer.all_ids) == (None, [[97], [98], [99], [100]])
    assert pair[1].commands(Reserve) == []
    await door.idle()


async def test_when_all_end_at_once_both_workers_are_told(door: Door, pair: tuple[FakeWorker, FakeWorker]) -> None:
    prefill, decode = pair
    for worker in pair:
        worker.script = [256]
    answer = await ask(door, max_tokens=9)
    assert (answer.error, answer.all_ids) == (None, [[256]] * N)
    await until(lambda: decode.commands(Abort) and prefill.commands(Abort))
    assert decode.commands(Start) == []


async def test_decode_alone_computes_the_prompt_and_all_sequences(door: Door) -> None:
    async with FakeWorker(Role.DECODE, "d0") as decode:
        await join(door, decode)
        decode.cached_tokens = 99
        answer = await ask(door, max_tokens=3)
        assert (answer.error, answer.all_ids) == (None, [letters(s, 3) for s in range(N)])
        assert decode.commands(Reserve)[0].local_prefill
        assert decode.commands(Start) == []
        for s in range(N):
            finished = answer.finished_of(s)
            assert (finished.prefill_worker, finished.decode_worker) == ("", "d0")
            assert (finished.usage.cached_tokens, finished.HasField("hand_off")) == (5, False)
        assert (await ask(door, max_tokens=1)).all_ids == [[97], [98], [99], [100]]


async def test_decode_dies_after_the_fork_and_each_sequence_goes_on_alone(door: Door, pairs: Pairs) -> None:
    p0, p1, d0, d1 = pairs
    p0.cached_tokens, p1.cached_tokens = 2, 4
    held(d0, "token 3")
    answer, asked = begin(door, max_tokens=6, sampling={"seed": 7})
    await until(lambda: answer.num_tokens == [3] * N)
    await d0.die()
    await asked
    assert (answer.error, answer.all_ids) == (None, [letters(s, 6) for s in range(N)])
    for s in range(N):
        finished = answer.finished_of(s)
        assert (finished.decode_worker, finished.migrations, finished.usage.cached_tokens) == ("d1", 1, 2)
    again = {c.work.request_id: c.work for c in d1.commands(Reserve)}
    assert sorted(again) == [f"{answer.id}.{s}" for s in range(N)]
    for s, work in enumerate(again[name] for name in sorted(again)):
        assert (work.attempt, work.n, work.token_ids) == (1, 1, (*b"hello", *letters(s, 3)))
        assert work.sampling == Sampling(seed=7).of_sequence(s)
    assert sorted(c.first_tokens for c in d1.commands(Start)) == [(100,), (101,), (102,), (103,)]
    assert (door.counters["started"], door.counters["migrated"], door.counters["tokens"]) == (1, N, 6 * N)
    await door.idle()


async def test_one_sequence_that_decode_gives_up_moves_alone(door: Door, pairs: Pairs) -> None:
    _, _, d0, d1 = pairs
    held(d0, "token 2")
    answer, asked = begin(door, max_tokens=4)
    await until(lambda: answer.num_tokens == [2] * N)
    rid = d0.commands(Reserve)[0].work.request_id
    d0.aborted.add((rid, 0, 2))
    d0.say(Report(ended=(Ended(rid, 0, 2, "aborted"),)))
    await until(lambda: answer.of[2].finished is not None)
    assert answer.num_tokens == [2, 2, 4, 2]
    d0.say(Report(tokens=(TokenOut(rid, 0, 2, 4, 65), TokenOut(rid, 0, 9, 2, 65)), landed=(Landed(rid, 0),)))
    d0.let_go("token 2")
    await asked
    assert (answer.error, answer.all_ids) == (None, [letters(s, 4) for s in range(N)])
    assert [answer.finished_of(s).migrations for s in range(N)] == [0, 0, 1, 0]
    assert [c.work.request_id for c in d1.commands(Reserve)] == [f"{rid}.2"]
    assert d0.commands(Abort) == []


async def test_a_failed_hand_off_moves_all_sequences(door: Door, pairs: Pairs) -> None:
    p0, _, d0, d1 = pairs
    held(p0, "landed")
    held(d0, "decode")
    answer, asked = begin(door, max_tokens=3)
    await until(lambda: answer.num_tokens == [1] * N)
    rid = d0.commands(Reserve)[0].work.request_id
    d0.say(Report(ended=tuple(Ended(rid, 0, s, "failed", "Unavailable", "the writer is lost") for s in range(N))))
    await asked
    assert (answer.error, answer.all_ids) == (None, [letters(s, 3) for s in range(N)])
    assert len(d1.commands(Reserve)) == N
    assert (p0.commands(Abort), d0.commands(Abort)) == ([], [])


async def test_a_worker_lost_before_the_fork_moves_the_whole_request(door: Door, pairs: Pairs) -> None:
    p0, _, d0, d1 = pairs
    held(p0, "token0")
    answer, asked = begin(door, max_tokens=3)
    await until(lambda: p0.commands(Prefill))
    await d0.die()
    await asked
    assert (answer.error, answer.all_ids) == (None, [letters(s, 3) for s in range(N)])
    (work,) = (c.work for c in d1.commands(Reserve))
    assert (work.request_id, work.attempt, work.n) == (answer.id, 1, N)
    assert [answer.finished_of(s).migrations for s in range(N)] == [1] * N
    await until(lambda: [(c.attempt, c.sequence) for c in p0.commands(Abort)] == [(0, None)])


@pytest.mark.parametrize("landed", [True, False])
async def test_prefill_dies_after_the_fork_and_decode_is_asked_first(door: Door, pairs: Pairs, landed: bool) -> None:
    p0, _, d0, d1 = pairs
    held(p0, "landed")
    held(d0, "decode")
    answer, asked = begin(door, max_tokens=3)
    await until(lambda: d0.commands(Start))
    await p0.die()
    await until(lambda: door.counters["checked_back"] == N)
    if not landed:
        await until(lambda: door.counters["migrated"] == N)
    d0.let_go("decode")
    await asked
    assert (answer.error, answer.all_ids) == (None, [letters(s, 3) for s in range(N)])
    assert [answer.finished_of(s).migrations for s in range(N)] == [0 if landed else 1] * N
    assert len(d0.commands(Reserve)) + len(d1.commands(Reserve)) == 1 + (0 if landed else N)
    assert sorted(c.sequence for c in d0.commands(Abort)) == ([] if landed else [0, 1, 2, 3])


@pytest.mark.parametrize("how", ["cancel", "deadline"])
async def test_a_client_that_leaves_aborts_each_sequence_that_runs(
    door: Door, pair: tuple[FakeWorker, FakeWorker], how: str
) -> None:
    prefill, decode = pair
    for worker in pair:
        worker.scripts = {1: [256]}
    held(decode, "token 2")
    fields = {"timeout": 0.6} if how == "deadline" else {}
    answer, asked = begin(door, max_tokens=9, **fields)
    await until(lambda: answer.num_tokens == [2, 1, 2, 2])
    if how == "cancel":
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
    else:
        await asked
        assert isinstance(answer.error, DeadlineExceeded)
    await until(lambda: len(decode.commands(Abort)) == 3)
    assert sorted(c.sequence for c in decode.commands(Abort)) == [0, 2, 3]
    assert prefill.commands(Abort) == []
    await door.idle()


async def test_a_client_that_leaves_before_the_fork_aborts_the_attempt(
    door: Door, pair: tuple[FakeWorker, FakeWorker]
) -> None:
    prefill, decode = pair
    held(prefill, "token0")
    _, asked = begin(door)
    await until(lambda: prefill.commands(Prefill))
    asked.cancel()
    await until(lambda: prefill.commands(Abort) and decode.commands(Abort))
    assert [(c.attempt, c.sequence) for c in decode.commands(Abort)] == [(0, None)]
    await door.idle()


async def test_the_first_error_of_a_sequence_ends_the_stream_for_all(
    door: Door, pair: tuple[FakeWorker, FakeWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also at the workers, and before the client has read of it."""
    _, decode = pair
    dispatcher, left = door.coordinator.dispatcher, list[RequestId]()
    monkeypatch.setattr(dispatcher, "leave", left.append)
    held(decode, "token 2")
    answer, asked = begin(door, max_tokens=9)
    await until(lambda: answer.num_tokens == [2] * N)
    decode.say(Report(tokens=(TokenOut(decode.commands(Reserve)[0].work.request_id, 0, 3, 2, 10**6),)))
    await asked
    assert isinstance(answer.error, Internal)
    assert "outside the vocabulary" in answer.error.message
    await until(lambda: len(decode.commands(Abort)) == N)
    assert not dispatcher._live
    monkeypatch.undo()
    dispatcher.leave(left[0])
    await door.idle()
    assert (door.counters["outcome.Internal"], door.counters["outcome.Cancelled"]) == (1, N - 1)


def _missing(rid: Any) -> Report:
    return Report(tokens=tuple(TokenOut(rid, 0, s, 0, 65) for s in range(N - 1)))


def _doubled(rid: Any) -> Report:
    return Report(tokens=tuple(TokenOut(rid, 0, s, 0, 65) for s in (0, 1, 2, 2)))


def _not_first(rid: Any) -> Report:
    return Report(tokens=tuple(TokenOut(rid, 0, s, 1, 65) for s in range(N)))


def _stale(rid: Any) -> Report:
    return Report(tokens=tuple(TokenOut(rid, 7, s, 0, 65) for s in range(N)), records=(ComputeRecord(rid, 7, 0, 0),))


@pytest.mark.parametrize("report", [_missing, _doubled, _not_first, _stale])
async def test_first_tokens_that_are_not_all_of_them_fork_nothing(
    door: Door, pair: tuple[FakeWorker, FakeWorker], report: Callable[[Any], Report]
) -> None:
    prefill, _ = pair
    held(prefill, "token0")
    answer, asked = begin(door, max_tokens=2)
    await until(lambda: prefill.commands(Prefill))
    prefill.say(report(prefill.commands(Prefill)[0].work.request_id))
    prefill.let_go("token0")
    await asked
    assert (answer.error, answer.all_ids) == (None, [letters(s, 2) for s in range(N)])


async def test_a_long_report_cut_between_the_first_tokens_forks_all_the_same(
    door: Door, pair: tuple[FakeWorker, FakeWorker]
) -> None:
    prefill, decode = pair
    held(prefill, "token0")
    answer, asked = begin(door, max_tokens=3)
    await until(lambda: prefill.commands(Prefill))
    report = _cut_between(prefill.commands(Prefill)[0].work.request_id)
    prefill.say(report)
    await asked
    assert (answer.error, answer.all_ids) == (None, [letters(s, 3) for s in range(N)])
    assert [start.first_tokens for start in decode.commands(Start)] == [(97, 98, 99, 100)]


def _cut_between(rid: Any) -> Report:
    """First tokens among so many of other requests that the second frame begins with that of sequence 1."""
    others = tuple(TokenOut(RequestId("f" * 32), 1, 0, i + 1, 97) for i in range(8_000))
    firsts = tuple(TokenOut(rid, 0, s, 0, 97 + s) for s in range(N))
    full = len(report_to_protos(Report(tokens=others))[0].tokens)
    for before in range(full - 6, full + 4):
        report = Report(tokens=(*others[:before], *firsts, *others[before:]))
        head = report_to_protos(report)[1].tokens[0]
        if (head.request_id, head.sequence) == (rid, 1):
            return report
    raise AssertionError("no report of these is cut there")


async def test_attempts_that_are_used_up_end_the_stream(door: Door) -> None:
    async with FakeWorker(Role.PREFILL, "p0") as p0, FakeWorker(Role.DECODE, "d0") as d0:
        await join(door, p0, d0)
        held(d0, "decode")
        answer, asked = begin(door, max_tokens=3)
        await until(lambda: answer.num_tokens == [1] * N)
        await d0.die()
        await asked
    error: KVRelayError | None = answer.error
    assert isinstance(error, Unavailable)
    await door.idle()


async def test_a_request_asked_later_is_placed_after_all_sequences_of_one_that_moves(door: Door, pairs: Pairs) -> None:
    """Each sequence has a place of its own in the queue, before whoever came after its request."""
    _, _, d0, d1 = pairs
    held(d0, "token 1")
    answer, asked = begin(door, max_tokens=3)
    await until(lambda: answer.num_tokens == [1] * N)
    d0.hold["reserve"] = d1.hold["reserve"] = asyncio.Event()
    await d0.die()
    await until(lambda: len(d1.commands(Reserve)) == N)
    names = [c.work.request_id for c in d1.commands(Reserve)]
    assert names == [f"{answer.id}.{s}" for s in range(N)]
    d1.let_go("reserve")
    assert (await door.ask(text="later", max_tokens=2)).error is None
    await asked
    assert answer.all_ids == [letters(s, 3) for s in range(N)]
