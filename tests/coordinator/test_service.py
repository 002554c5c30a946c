"""The whole coordinator over real gRPC, with fake workers: every door, every phase, every bad request."""

from __future__ import annotations

import asyncio
import functools
import time
from dataclasses import replace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.door import MODEL, Door, held, join, read_all, until
from support.fake_workers import LAYOUT, FakeWorker

from coordinator import dispatch, validate
from coordinator.main import INFERENCE, Coordinator
from coordinator.states import Phase
from coordinator.stream import TokenItem
from kvrelay.config import CoordinatorConfig
from kvrelay.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    KVRelayError,
    LayoutMismatch,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from kvrelay.requests import RequestId, Role
from kvrelay.rpc.channel import open_channel
from kvrelay.rpc.status import from_rpc_error
from kvrelay.session import Abort, Drain, Hello, Prefill, Refused, Reserve, Start
from kvrelay.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, model_pb2, model_pb2_grpc


async def end_of(call: Any) -> grpc.StatusCode:
    """Reads a call to its end; its status."""
    try:
        while await call.read() is not grpc.aio.EOF:
            pass
    except grpc.RpcError:
        pass
    code: grpc.StatusCode = await call.code()
    return code


async def test_a_stream_from_accepted_to_finished(door: Door, pair: tuple[FakeWorker, FakeWorker]) -> None:
    prefill, decode = pair
    answer = await door.ask(text="hello", max_tokens=5, sampling={"seed": 7})
    assert answer.error is None
    assert answer.accepted is not None
    assert (answer.accepted.prompt_tokens, answer.accepted.seed, answer.accepted.model) == (5, 7, "hash")
    assert (answer.ids, answer.text) == ([97, 98, 99, 100, 101], "abcde")
    finished = answer.finished
    assert finished is not None
    assert (finished.prefill_worker, finished.decode_worker, finished.reason) == ("p0", "d0", 2)
    assert (finished.usage.prompt_tokens, finished.usage.completion_tokens) == (5, 5)
    assert (finished.hand_off.transport, finished.hand_off.num_blocks) == ("grpc", 1)
    assert finished.hand_off.num_bytes == LAYOUT.block_bytes
    offsets = [t.offset_s for t in answer.tokens]
    assert offsets == sorted(offsets)
    assert offsets[-1] <= finished.offset_s
    assert [type(c) for c in prefill.got] == [Hello, Prefill]
    assert [type(c) for c in decode.got] == [Hello, Reserve, Start]
    assert decode.got[2].first_tokens == (97,)
    await door.idle()
    assert door.counters["outcome.length"] == 1


async def test_a_seed_is_drawn_when_none_was_given(door: Door, pair: tuple[FakeWorker, FakeWorker]) -> None:
    answers = await asyncio.gather(*(door.ask(text="x", max_tokens=1) for _ in range(8)))
    seeds = {a.accepted.seed for a in answers if a.accepted}
    assert len(seeds) == 8
    assert {c.work.sampling.seed for c in pair[0].commands(Prefill)} == seeds


async def test_max_tokens_1_never_touches_decode(door: Door, pair: tuple[FakeWorker, FakeWorker]) -> None:
    answer = await door.ask(text="x", max_tokens=1)
    assert (answer.ids, answer.finished is not None and answer.finished.HasField("hand_off")) == ([97], False)
    assert answer.finished is not None
    assert (answer.finished.usage.completion_tokens, answer.finished.decode_worker) == (1, "")
    assert [type(c) for c in pair[1].got] == [Hello]


@pytest.mark.parametrize(
    ("script", "fields", "ids", "text"),
    [
        ([256], {}, [256], ""),
        ([120], {"stop_token_ids": [120]}, [120], ""),
        ([120], {"stop": ["x"]}, [120], ""),
        ([97, 98, 256], {}, [97, 98, 256], "ab"),
        ([97, 120, 121, 122], {"stop": ["xyz"]}, [97, 120, 121, 122], "a"),
        ([0xC3, 0xA9, 256], {}, [0xC3, 0xA9, 256], "é"),
        ([97, 256, 98, 257, 99], {"ignore_eos": True, "max_tokens": 5}, [97, 256, 98, 257, 99], "abc"),
        ([97, 120, 121], {"stop": ["xyz"], "max_tokens": 3}, [97, 120, 121], "axy"),
    ],
)
async def test_stops_and_text(
    door: Door,
    pair: tuple[FakeWorker, FakeWorker],
    script: list[int],
    fields: dict[str, Any],
    ids: list[int],
    text: str,
) -> None:
    for worker in pair:
        worker.script = script
    answer = await door.ask(text="q", **fields)
    assert answer.error is None
    assert (answer.ids, answer.text) == (ids, text)
    assert answer.finished is not None
    assert answer.finished.usage.completion_tokens == len(ids)
    assert answer.finished.reason == (2 if "max_tokens" in fields else 1)
    if len(ids) == 1:
        await until(lambda: pair[1].commands(Abort))
        assert pair[1].commands(Start) == []


async def test_sixteen_streams_at_once_keep_their_indexes(door: Door, pair: tuple[FakeWorker, FakeWorker]) -> None:
    answers = await asyncio.gather(*(door.ask(text="x" * (n + 1), max_tokens=40) for n in range(16)))
    assert all(a.error is None and a.ids == [97 + i % 26 for i in range(40)] for a in answers)
    assert sorted(a.accepted.prompt_tokens for a in answers if a.accepted) == list(range(1, 17))


PHASES = {
    "reserving": (Role.DECODE, "reserve", Reserve, [Role.DECODE]),
    "prefilling": (Role.PREFILL, "token0", Prefill, [Role.DECODE, Role.PREFILL]),
    "decoding": (Role.DECODE, "decode", Start, [Role.DECODE, Role.PREFILL]),
}


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("how", ["cancel", "deadline"])
async def test_an_early_end_in_each_phase_aborts_at_once(
    door: Door, pair: tuple[FakeWorker, FakeWorker], phase: str, how: str
) -> None:
    role, step, sign, aborted = PHASES[phase]
    prefill, decode = pair
    worker = prefill if role is Role.PREFILL else decode
    held(worker, step)
    if phase == "decoding":
        held(prefill, "landed")
    call = door.call(timeout=0.4 if how == "deadline" else None, text="hello")
    reading = asyncio.ensure_future(read_all(call))
    await until(lambda: worker.commands(sign))
    if how == "cancel":
        call.cancel()
        began = time.monotonic()
    else:
        answer = await reading
        assert isinstance(answer.error, DeadlineExceeded)
        began = time.monotonic()
    for other in aborted:
        await until(functools.partial((prefill if other is Role.PREFILL else decode).commands, Abort), 1.0)
    assert time.monotonic() - began < 0.5
    if Role.PREFILL not in aborted:
        assert prefill.commands(Abort) == []
    await asyncio.gather(reading, return_exceptions=True)
    await door.idle()
    outcome = "Cancelled" if how == "cancel" else "DeadlineExceeded"
    assert {k: v for k, v in door.counters.items() if k.startswith("outcome")} in (
        {f"outcome.{outcome}": 1},
        {"outcome.Cancelled": 1},
    )
    worker.let_go(step)


async def test_workers_get_the_time_left_plus_a_second(door: Door, pair: tuple[FakeWorker, FakeWorker]) -> None:
    assert (await door.ask(timeout=5.0, text="x", max_tokens=2)).error is None
    left = pair[1].commands(Reserve)[0].work.deadline_s
    assert 5.0 < left <= 6.0
    assert (await door.ask(text="x", max_tokens=2)).error is None
    assert pair[1].commands(Reserve)[1].work.deadline_s is None


async def test_a_cancel_while_queued_never_reaches_a_worker(door: Door, pair: tuple[FakeWorker, FakeWorker]) -> None:
    decode = pair[1]
    held(decode, "reserve")
    first = door.call(text="x" * 900)
    await until(lambda: decode.commands(Reserve))
    second = door.call(text="y" * 900)
    await second.read()
    await until(lambda: door.coordinator.dispatcher.num_queued == 1)
    second.cancel()
    await until(lambda: door.coordinator.dispatcher.num_queued == 0)
    first.cancel()
    await door.idle()
    decode.let_go("reserve")
    assert len(decode.commands(Reserve)) == 1


@pytest.mark.parametrize("door", [{"queue_limit": 2}], indirect=True)
async def test_a_full_queue_refuses_at_once_with_a_hint(door: Door, pair: tuple[FakeWorker, FakeWorker]) -> None:
    held(pair[1], "reserve")
    calls = []
    for _ in range(3):
        calls.append(door.call(text="x" * 900))
        await calls[-1].read()
    began = time.monotonic()
    answer = await door.ask(text="x")
    assert isinstance(answer.error, ResourceExhausted)
    assert answer.error.retry_after_s == 1.0
    assert time.monotonic() - began < 0.2
    for call in calls:
        call.cancel()
    await door.idle()
    pair[1].let_go("reserve")
    assert (await door.ask(text="x", max_tokens=2)).error is None


@pytest.mark.parametrize("door", [{"open_limit": 2}], indirect=True)
async def test_the_number_of_open_streams_is_bounded(door: Door, pair: tuple[FakeWorker, FakeWorker]) -> None:
    held(pair[1], "decode")
    calls = [door.call(text="x") for _ in range(2)]
    for call in calls:
        await call.read()
    answer = await door.ask(text="x")
    assert isinstance(answer.error, ResourceExhausted)
    pair[1].let_go("decode")
    for call in calls:
        call.cancel()
    await door.idle()


async def test_without_workers_the_answer_is_unavailable_at_once(door: Door) -> None:
    answer = await door.ask(text="x")
    assert isinstance(answer.error, Unavailable)
    assert answer.error.message == "no worker has a session here"


LIMIT = 64 * 16


@pytest.mark.parametrize(
    ("fields", "error", "path"),
    [
        ({}, InvalidArgument, "prompt"),
        ({"text": ""}, InvalidArgument, "text"),
        ({"tokens": {"ids": []}}, InvalidArgument, "tokens.ids"),
        ({"tokens": {"ids": [1, 2, 3, -1]}}, InvalidArgument, "tokens.ids[3]"),
        ({"tokens": {"ids": [258]}}, InvalidArgument, "tokens.ids[0]"),
        ({"tokens": {"ids": [-(2**63)]}}, InvalidArgument, "tokens.ids[0]"),
        ({"tokens": {"ids": [1] * LIMIT}}, InvalidArgument, "tokens.ids"),
        ({"text": "x" * (LIMIT + 1)}, InvalidArgument, "text"),
        ({"text": "x", "max_tokens": 0}, InvalidArgument, "max_tokens"),
        ({"text": "x", "max_tokens": -(2**63)}, InvalidArgument, "max_tokens"),
        ({"text": "x", "max_tokens": LIMIT}, InvalidArgument, "max_tokens"),
        ({"text": "x", "max_tokens": 2**63 - 1}, InvalidArgument, "max_tokens"),
        ({"text": "x", "sampling": {"temperature": float("nan")}}, InvalidArgument, "sampling.temperature"),
        ({"text": "x", "sampling": {"temperature": float("inf")}}, InvalidArgument, "sampling.temperature"),
        ({"text": "x", "sampling": {"temperature": -1}}, InvalidArgument, "sampling.temperature"),
        ({"text": "x", "sampling": {"top_p": 0}}, InvalidArgument, "sampling.top_p"),
        ({"text": "x", "sampling": {"top_k": -1}}, InvalidArgument, "sampling.top_k"),
        ({"text": "x", "stop": [""]}, InvalidArgument, "stop[0]"),
        ({"text": "x", "stop": ["a", "b" * 257]}, InvalidArgument, "stop[1]"),
        ({"text": "x", "stop": ["a"] * 100_000}, InvalidArgument, "stop"),
        ({"text": "x", "stop_token_ids": [-1]}, InvalidArgument, "stop_token_ids[0]"),
        ({"text": "x", "n": 0}, InvalidArgument, "n"),
        ({"text": "x", "n": 17}, InvalidArgument, "n"),
        ({"text": "x", "n": 10**6}, InvalidArgument, "n"),
        ({"text": "x", "model": "other"}, NotFound, "model"),
        ({"chat": {"messages": [{"role": "user", "content": "x"}]}}, InvalidArgument, "chat"),
    ],
)
async def test_bad_input_names_its_field_and_reaches_no_worker(
    door: Door, pair: tuple[FakeWorker, FakeWorker], fields: dict[str, Any], error: type, path: str
) -> None:
    answer = await door.ask(**fields)
    assert type(answer.error) is error
    assert isinstance(answer.error, KVRelayError)
    assert answer.error.field == path
    assert (answer.accepted, answer.tokens) == (None, [])
    assert [type(c) for worker in pair for c in worker.got] == [Hello, Hello]
    assert door.coordinator.dispatcher.num_open == 0


async def test_a_prompt_of_context_minus_1_gets_exactly_1_token(
    door: Door, pair: tuple[FakeWorker, FakeWorker]
) -> None:
    info = await model_pb2_grpc.ModelServiceStub(door.channel).GetModel(model_pb2.GetModelRequest())
    assert (info.context_limit, info.block_size, info.max_stop_strings) == (LIMIT, 16, validate.MAX_STOP_STRINGS)
    answer = await door.ask(text="x" * (LIMIT - 1))
    assert (answer.error, answer.ids) == (None, [97])


async def test_bytes_that_are_no_message_and_no_utf8_are_the_clients_error(
    door: Door, pair: tuple[FakeWorker, FakeWorker]
) -> None:
    for raw in (b"\xff\xff\xff", b"\x12\x02\xc3\x28"):
        method: Any = door.channel.unary_stream(f"/{INFERENCE}/Generate", request_serializer=bytes)
        with pytest.raises(grpc.aio.AioRpcError) as info:
            async for _ in method(raw):
                pass
        assert info.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (await door.ask(text="x", max_tokens=2)).error is None


@pytest.mark.parametrize("door", [{"max_request_bytes": 4096}], indirect=True)
async def test_a_message_over_the_limit_is_refused_and_the_channel_stays_usable(
    door: Door, pair: tuple[FakeWorker, FakeWorker]
) -> None:
    answer = await door.ask(text="x" * 200_000)
    assert isinstance(answer.error, ResourceExhausted)
    assert (await door.ask(text="x", max_tokens=2)).error is None


@pytest.mark.parametrize("token_id", [258, 2**40, -5])
async def test_a_token_outside_the_vocabulary_ends_only_its_stream(
    door: Door, pair: tuple[FakeWorker, FakeWorker], token_id: int
) -> None:
    prefill, decode = pair
    decode.step_s = 0.01
    neighbour = asyncio.ensure_future(door.ask(text="good", max_tokens=30))
    await until(lambda: decode.commands(Start))
    prefill.script = [token_id]
    answer = await door.ask(text="bad", max_tokens=30)
    assert type(answer.error) is Internal
    assert str(token_id) not in answer.error.message
    assert answer.tokens == []
    assert len((await neighbour).tokens) == 30
    assert door.counters["token_outside_vocabulary"] == 1


async def test_no_room_on_decode_is_tried_again_until_there_is(door: Door, pair: tuple[FakeWorker, FakeWorker]) -> None:
    decode = pair[1]
    decode.refuse = Refused(RequestId(""), 0, "ResourceExhausted", "full")
    asked = asyncio.ensure_future(door.ask(text="x", max_tokens=3))
    await until(lambda: len(decode.commands(Reserve)) >= 3)
    decode.refuse = None
    answer = await asked
    assert (answer.error, answer.ids) == (None, [97, 98, 99])
    attempts = [c.work.attempt for c in decode.commands(Reserve)]
    assert attempts == list(range(len(attempts)))


@pytest.mark.parametrize("at", [0, 1])
async def test_another_refusal_reaches_the_client(door: Door, pair: tuple[FakeWorker, FakeWorker], at: int) -> None:
    pair[at].refuse = Refused(RequestId(""), 0, "FailedPrecondition", "not with me", "layout")
    answer = await door.ask(text="x", max_tokens=3)
    assert isinstance(answer.error, FailedPrecondition)
    assert (answer.error.message, answer.error.field) == ("not with me", "layout")
    await door.idle()


async def test_a_worker_that_comes_back_under_its_id_is_used(door: Door, pair: tuple[FakeWorker, FakeWorker]) -> None:
    await pair[1].die()
    await until(lambda: len(door.coordinator.roster.listing()) == 1)
    async with FakeWorker(Role.DECODE, "d0", life="two") as again:
        await again.announce_to(door.address)
        await until(lambda: len(door.coordinator.roster.listing()) == 2)
        answer = await door.ask(text="x", max_tokens=3)
        assert (answer.error, answer.ids) == (None, [97, 98, 99])
        assert len(again.commands(Reserve)) == 1


async def test_a_changed_address_replaces_the_old_session(door: Door, pair: tuple[FakeWorker, FakeWorker]) -> None:
    async with FakeWorker(Role.DECODE, "d0") as moved:
        await moved.announce_to(door.address)
        await until(lambda: moved.commands(Hello) and len(door.coordinator.roster.listing()) == 2)
        assert (await door.ask(text="x", max_tokens=3)).error is None
        assert (len(moved.commands(Reserve)), pair[1].commands(Reserve)) == (1, [])
        await until(lambda: pair[1].sessions == [])


async def test_two_of_each_role_share_the_requests(door: Door, pair: tuple[FakeWorker, FakeWorker]) -> None:
    async with FakeWorker(Role.PREFILL, "p1") as p1, FakeWorker(Role.DECODE, "d1") as d1:
        await p1.announce_to(door.address)
        await d1.announce_to(door.address)
        await until(lambda: len(door.coordinator.roster.listing()) == 4)
        for _ in range(4):
            assert (await door.ask(text="x", max_tokens=3)).error is None
        assert [len(w.commands(Prefill)) for w in (pair[0], p1)] == [2, 2]
        assert [len(w.commands(Reserve)) for w in (pair[1], d1)] == [2, 2]


async def test_a_worker_that_does_not_pair_is_refused_by_name(door: Door, pair: tuple[FakeWorker, FakeWorker]) -> None:
    async with FakeWorker(Role.DECODE, "d9") as other:
        with pytest.raises(LayoutMismatch, match="16 here, 32 there") as info:
            await other.announce_to(door.address, layout=replace(LAYOUT, block_size=32))
        assert info.value.field == "layout.block_size"
        assert other.got == []


async def test_a_buffer_over_its_bound_ends_the_stream_and_holds_nobody(
    door: Door, pair: tuple[FakeWorker, FakeWorker]
) -> None:
    decode = pair[1]
    decode.step_s = 0.005
    neighbour = asyncio.ensure_future(door.ask(text="x", max_tokens=50))
    slow = asyncio.ensure_future(door.ask(text="slow", max_tokens=900))
    dispatcher = door.coordinator.dispatcher
    await until(lambda: len(decode.commands(Start)) == 2)
    live = next(v for v in dispatcher._live.values() if len(v.facts.prompt_ids) == 4)
    live.stream._limit_bytes = 0
    answer = await slow
    assert isinstance(answer.error, ResourceExhausted)
    assert len((await neighbour).tokens) == 50
    assert [c.request_id for c in decode.commands(Abort)] == [live.id]
    await door.idle()


async def test_a_reader_that_stops_reading_gets_resource_exhausted(
    door: Door, pair: tuple[FakeWorker, FakeWorker]
) -> None:
    held(pair[1], "decode")
    call = door.call(text="x", max_tokens=900)
    await until(lambda: door.coordinator.dispatcher._live)
    live = next(iter(door.coordinator.dispatcher._live.values()))
    await call.read()
    await until(lambda: live.state.phase is Phase.DECODING)
    for index in range(300):
        live.stream.put(TokenItem(index, 97, "y" * 100_000, 0.0))
    await until(lambda: live.stream.stuck_s(time.monotonic()) > 0.2)
    live.stream.cut_off(ResourceExhausted("too slow"))
    async with asyncio.timeout(20):
        assert await end_of(call) is grpc.StatusCode.RESOURCE_EXHAUSTED
    await door.idle()


@pytest.mark.parametrize("n", [1, 2])
async def test_a_reader_that_is_cut_off_has_not_left(
    door: Door, pair: tuple[FakeWorker, FakeWorker], monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    """What is told of its request is what the client is told."""
    monkeypatch.setattr(dispatch, "STUCK_READER_S", 0.3)
    held(pair[1], "decode")
    call = door.call(text="x", max_tokens=900, n=n)
    await call.read()
    await until(lambda: pair[1].commands(Start))
    (stream,) = door.coordinator.dispatcher._open.values()
    for index in range(300):
        stream.put(TokenItem(index, 97, "y" * 100_000, 0.0))
    await door.idle()
    assert door.coordinator.figures.outcomes == {"ResourceExhausted": 1}
    assert (door.counters["outcome.ResourceExhausted"], door.counters["outcome.Cancelled"]) == (1, n - 1)
    async with asyncio.timeout(20):
        assert await end_of(call) is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_tokenize_and_detokenize(door: Door) -> None:
    answer = await door.stub.Tokenize(inference_pb2.TokenizeRequest(text="né"))
    assert list(answer.token_ids) == [110, 0xC3, 0xA9]
    text = await door.stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=[110, 0xC3, 0xA9, 256]))
    assert text.text == "né"
    with pytest.raises(grpc.aio.AioRpcError) as info:
        await door.stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=[1, 258]))
    assert from_rpc_error(info.value).field == "token_ids[1]"


async def test_topology_and_drain(door: Door, pair: tuple[FakeWorker, FakeWorker]) -> None:
    stub = admin_pb2_grpc.AdminServiceStub(door.channel)
    topology = await stub.GetTopology(admin_pb2.GetTopologyRequest())
    assert [(w.description.worker_id, w.load.blocks.free) for w in topology.workers] == [("d0", 64), ("p0", 64)]
    assert topology.coordinator_id == door.coordinator.roster.coordinator_id
    await stub.DrainWorker(admin_pb2.DrainWorkerRequest(worker_id="d0", grace_s=3))
    await until(lambda: pair[1].commands(Drain) == [Drain(3.0)])
    with pytest.raises(grpc.aio.AioRpcError) as info:
        await stub.DrainWorker(admin_pb2.DrainWorkerRequest(worker_id="nobody"))
    assert isinstance(from_rpc_error(info.value), NotFound)


async def test_readiness_follows_the_workers(door: Door) -> None:
    health = health_pb2_grpc.HealthStub(door.channel)

    async def status(service: str) -> int:
        return int((await health.Check(health_pb2.HealthCheckRequest(service=service))).status)

    async def becomes(wanted: int) -> None:
        end = time.monotonic() + 5
        while await status(INFERENCE) != wanted:
            assert time.monotonic() < end
            await asyncio.sleep(0.02)

    assert (await status(""), await status(INFERENCE)) == (1, 2)
    async with FakeWorker(Role.PREFILL, "p0") as prefill, FakeWorker(Role.DECODE, "d0") as decode:
        await join(door, prefill, decode)
        await becomes(1)
    await becomes(2)


async def test_a_stop_lets_open_streams_end_and_cuts_what_is_left() -> None:
    config = CoordinatorConfig(listen="127.0.0.1:0", executor="hash")
    coordinator = Coordinator(config, MODEL)
    address = await coordinator.start()
    async with (
        open_channel(address) as channel,
        FakeWorker(Role.PREFILL, "p0") as prefill,
        FakeWorker(Role.DECODE, "d0") as decode,
    ):
        door = Door(coordinator, address, channel)
        await join(door, prefill, decode)
        decode.step_s = 0.01
        good = asyncio.ensure_future(door.ask(text="x", max_tokens=20))
        endless = asyncio.ensure_future(door.ask(text="x", max_tokens=900))
        await until(lambda: len(decode.commands(Start)) == 2)
        stopping = asyncio.ensure_future(coordinator.stop(1.0))
        await until(lambda: coordinator.server.edge.draining)
        late = await door.ask(text="x", max_tokens=2)
        assert isinstance(late.error, Unavailable)
        assert len((await good).tokens) == 20
        cut = await endless
        assert isinstance(cut.error, Unavailable)
        assert cut.error.message == "the coordinator is shutting down"
        await stopping
    # gRPC ends the tasks of calls that a stop cancelled a little after the stop itself
    await until(lambda: asyncio.all_tasks() == {asyncio.current_task()})


async def test_a_port_in_use_is_named(door: Door) -> None:
    config = CoordinatorConfig(listen=door.address, executor="hash")
    other = Coordinator(config, MODEL)
    with pytest.raises(FailedPrecondition, match=door.address):
        await other.start()
    await other.stop(0)


async def test_a_stream_that_is_over_but_for_a_figure_ends_well_in_a_shutdown(
    door: Door, pair: tuple[FakeWorker, FakeWorker]
) -> None:
    """Its last message waits for what the hand-off cost, which prefill has not said."""
    held(pair[0], "landed")
    answer, asked = door.begin(text="hello", max_tokens=3)
    dispatcher = door.coordinator.dispatcher
    await until(lambda: any(live.finish is not None for live in dispatcher._live.values()))
    dispatcher.end_all(Unavailable("the coordinator is shutting down"))
    assert not dispatcher._live, "the process may be gone before the wait would be over"
    await asked
    assert (answer.error, answer.ids) == (None, [97, 98, 99])
    assert answer.finished is not None
    assert answer.finished.usage.completion_tokens == 3
    await door.idle()
