"""Round trips of every message, and what strict reading says about a message that is wrong."""

from __future__ import annotations

import functools
import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay import link, session
from kvrelay.blocks import (
    BlockCounts,
    BlockEventKind,
    BlockEvents,
    BlockKey,
    BlockRun,
    BlockTable,
    KVLayout,
    Ticket,
    blocks_for,
)
from kvrelay.errors import InvalidArgument, KVRelayError, Unimplemented
from kvrelay.requests import Logprobs, Priority, Role, Sampling, StopRule
from kvrelay.rpc import convert
from kvrelay.rpc.description_convert import layout_from_proto, table_to_proto
from kvrelay.v1 import common_pb2, link_pb2, worker_pb2

calmly = settings(deadline=None, max_examples=80)
"""A busy machine is not a failure."""
U32 = st.integers(0, 2**32 - 1)
U32_POSITIVE = st.integers(1, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
NAME = st.text(min_size=1, max_size=12)
TEXT = st.text(max_size=12)
SECONDS = st.floats(0, 1e9, allow_nan=False)
POSITIVE_SECONDS = st.floats(1e-6, 1e9, allow_nan=False)

layouts = st.builds(
    KVLayout,
    kv_heads=U32_POSITIVE,
    layers=U32_POSITIVE,
    block_size=U32_POSITIVE,
    head_dim=U32_POSITIVE,
    dtype=st.sampled_from(["float32", "bfloat16", "float16", "uint8"]),
    layer_group=U32,
    shards=U32_POSITIVE,
)


@st.composite
def tickets(draw: st.DrawFn) -> Ticket:
    block_size = draw(st.integers(1, 64))
    ids = tuple(draw(st.lists(U32, max_size=8)))
    num_tokens = draw(st.integers(0, block_size * len(ids)))
    table = BlockTable(draw(U32), block_size, ids, num_tokens)
    cached = draw(st.integers(0, blocks_for(num_tokens, block_size)))
    return Ticket(draw(NAME), draw(U64), table, cached)


FINITE = st.floats(allow_nan=False, allow_infinity=False)
biases = st.dictionaries(st.integers(-(2**63), 2**63 - 1), FINITE, max_size=4).map(lambda d: tuple(sorted(d.items())))
samplings = st.builds(
    Sampling,
    temperature=st.floats(0, 100),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=st.integers(0, 2**63 - 1),
    seed=U64,
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0, 100, exclude_min=True),
    presence_penalty=FINITE,
    frequency_penalty=FINITE,
    logit_bias=biases,
    grammar=TEXT,
    logprobs=st.none() | st.integers(0, 2**63 - 1),
)
logprobs = st.builds(Logprobs, FINITE, st.lists(st.tuples(st.integers(0, 2**63 - 1), FINITE), max_size=3).map(tuple))


@st.composite
def works(draw: st.DrawFn) -> session.Work:
    ids = tuple(draw(st.lists(U32, min_size=1, max_size=20)))
    return session.Work(
        request_id=draw(NAME),
        attempt=draw(U32),
        token_ids=ids,
        num_prompt_tokens=draw(st.integers(1, len(ids))),
        sampling=draw(samplings),
        stop=StopRule(draw(U32_POSITIVE), draw(st.frozensets(U32, max_size=4)), draw(U32)),
        tenant=draw(NAME),
        cache_salt=draw(TEXT),
        n=draw(U32_POSITIVE),
        deadline_s=draw(st.none() | SECONDS),
        traceparent=draw(TEXT),
        prefix_cache=draw(st.booleans()),
        priority=draw(st.sampled_from(Priority)),
    )


models = st.builds(session.ModelIdentity, NAME, NAME, U32_POSITIVE, U32_POSITIVE, NAME)
descriptions = st.builds(
    session.WorkerDescription,
    worker_id=NAME,
    role=st.sampled_from(Role),
    incarnation=NAME,
    pid=st.integers(1, 2**31),
    address=NAME,
    model=models,
    layout=layouts,
    num_blocks=U32_POSITIVE,
    transport=NAME,
    executor=NAME,
    max_sequences=U32_POSITIVE,
    step_tokens=U32_POSITIVE,
    protocol_version=U32_POSITIVE,
    verify_kv=st.booleans(),
    prefix_cache=st.booleans(),
)
loads = st.builds(
    session.Load,
    blocks=st.builds(BlockCounts, U64, U64, U64, U64, U64, U64),
    running=U32,
    waiting=U32,
    queued_tokens=U64,
    transfers_in_flight=U32,
    tokens_per_s=SECONDS,
    draining=st.booleans(),
    counters=st.dictionaries(TEXT, st.integers(-(2**63), 2**63 - 1), max_size=4).map(
        lambda d: tuple(sorted(d.items()))
    ),
)
destinations = st.builds(session.Destination, NAME, NAME, tickets())
commands = st.one_of(
    st.builds(session.Hello, NAME, NAME, U32_POSITIVE),
    st.builds(session.Heartbeat, U64, SECONDS),
    st.builds(session.Prefill, works(), st.none() | destinations),
    st.builds(session.Reserve, works(), st.booleans()),
    st.builds(session.Start, NAME, U32, st.lists(U32, min_size=1, max_size=4).map(tuple)),
    st.builds(session.Abort, NAME, U32, st.none() | U32),
    st.builds(session.Drain, SECONDS),
)
token_outs = st.builds(session.TokenOut, NAME, U32, U32, U32, st.integers(0, 2**63 - 1), st.none() | logprobs)
records = st.builds(
    session.ComputeRecord,
    NAME,
    U32,
    SECONDS,
    SECONDS,
    st.lists(st.tuples(SECONDS, SECONDS, U32), max_size=3).map(tuple),
    U32,
)
endings = st.builds(session.Ended, NAME, U32, U32, st.sampled_from(["stop", "length", "aborted", "failed"]), NAME, TEXT)


def tuples(items: st.SearchStrategy) -> st.SearchStrategy:
    return st.lists(items, max_size=3).map(tuple)


key_runs = st.builds(
    BlockRun,
    st.sampled_from([BlockEventKind.STORED, BlockEventKind.EVICTED]),
    st.lists(st.binary(min_size=32, max_size=32).map(BlockKey), min_size=1, max_size=3).map(tuple),
)
runs = key_runs | st.just(BlockRun(BlockEventKind.CLEARED))
block_events = st.builds(BlockEvents, st.integers(1, 2**64 - 1), tuples(runs))
reports = st.builds(
    session.Report,
    step_id=U64,
    sent_at_s=SECONDS,
    heartbeat_seq=U64,
    welcome=st.none() | descriptions,
    reserved=tuples(st.builds(session.Reserved, NAME, U32, st.none() | tickets())),
    refused=tuples(st.builds(session.Refused, NAME, U32, NAME, TEXT, TEXT, st.none() | SECONDS)),
    tokens=tuples(token_outs),
    landed=tuples(st.builds(session.Landed, NAME, U32)),
    pushed=tuples(st.builds(session.Pushed, NAME, U32, NAME, U32, U64, U32, SECONDS, SECONDS)),
    records=tuples(records),
    ended=tuples(endings),
    load=st.none() | loads,
    block_events=tuples(block_events),
)
to_decode = st.one_of(
    st.builds(link.LinkHello, NAME, NAME, NAME, NAME, layouts, NAME, st.binary(max_size=8), U32_POSITIVE),
    st.builds(link.OpenTicket, U64, NAME, NAME, U32),
    st.builds(link.Renew, U64),
    st.builds(link.Fenced, U64),
    st.builds(link.BlockData, U64, U32, U32, U64, st.binary(min_size=1, max_size=32)),
    st.builds(link.PartManifest, st.binary(min_size=1, max_size=32)),
)
pools = st.builds(link.PoolDescriptor, U64, st.integers(1, 2**64 - 1), st.integers(1, 2**64 - 1), NAME, U32)
to_prefill = st.one_of(
    st.builds(link.LinkWelcome, NAME, NAME, layouts, NAME, pools, st.binary(max_size=8), POSITIVE_SECONDS),
    st.builds(link.Opened, U64, POSITIVE_SECONDS),
    st.builds(link.OpenRefused, U64, TEXT),
    st.builds(link.Renewed, U64, POSITIVE_SECONDS),
    st.builds(link.LandedNotice, U64),
    st.builds(link.AbortedNotice, U64, TEXT),
)


def over_the_wire(message):
    return type(message).FromString(message.SerializeToString())


def assemble(protos: list[worker_pb2.Command]) -> list[session.Command]:
    assembler = convert.CommandAssembler()
    return [c for c in (assembler.feed(over_the_wire(p)) for p in protos) if c is not None]


def joined(protos: list[worker_pb2.Report]) -> session.Report:
    return functools.reduce(session.Report.merge, (convert.report_from_proto(over_the_wire(p)) for p in protos))


@calmly
@given(commands)
def test_a_command_comes_back_as_it_was_sent(command):
    assert assemble(convert.command_to_protos(command)) == [command]


@calmly
@given(reports)
def test_a_report_comes_back_as_it_was_sent(report):
    (proto,) = convert.report_to_protos(report)
    assert convert.report_from_proto(over_the_wire(proto)) == report


@calmly
@given(to_decode)
def test_a_link_message_to_decode_comes_back_as_it_was_sent(message):
    assert convert.to_decode_from_proto(over_the_wire(convert.to_decode_to_proto(message))) == message


@calmly
@given(to_prefill)
def test_a_link_message_to_prefill_comes_back_as_it_was_sent(message):
    assert convert.to_prefill_from_proto(over_the_wire(convert.to_prefill_to_proto(message))) == message


@calmly
@given(descriptions)
def test_a_description_comes_back_as_it_was_sent(description):
    assert convert.description_from_proto(over_the_wire(convert.description_to_proto(description))) == description


@calmly
@given(loads)
def test_a_load_comes_back_as_it_was_sent(load):
    assert convert.load_from_proto(over_the_wire(convert.load_to_proto(load))) == load


def a_work(num_tokens: int = 3, **changes) -> session.Work:
    base = {
        "request_id": "r1",
        "attempt": 1,
        "token_ids": tuple(range(2**31, 2**31 + num_tokens)),
        "num_prompt_tokens": num_tokens,
        "sampling": Sampling(),
        "stop": StopRule(8, frozenset({2})),
    }
    return session.Work(**(base | changes))


def a_prefill() -> session.Prefill:
    table = BlockTable(0, 16, (1, 2), 20)
    return session.Prefill(a_work(), session.Destination("d1", "127.0.0.1:1", Ticket("inc", 7, table, 1)))


@pytest.mark.parametrize("num_tokens", [1, 52_000, 200_000])
def test_a_long_prompt_is_split_into_frames_under_the_limit_and_joined(num_tokens):
    command = session.Prefill(a_work(num_tokens), a_prefill().destination)
    protos = list(convert.command_to_protos(command))
    assert max(p.ByteSize() for p in protos) <= session.MAX_FRAME_BYTES
    assert len(protos) == {1: 1, 52_000: 1, 200_000: 4}[num_tokens]
    assert assemble(protos) == [command]


def test_frames_of_a_command_that_make_no_sense_are_refused():
    first, *rest = convert.command_to_protos(session.Reserve(a_work(120_000)))
    more = rest[0]
    with pytest.raises(InvalidArgument, match="continues no command"):
        convert.CommandAssembler().feed(more)
    interrupted = convert.CommandAssembler()
    assert interrupted.feed(over_the_wire(first)) is None
    with pytest.raises(InvalidArgument, match="a command is incomplete"):
        interrupted.feed(next(iter(convert.command_to_protos(session.Abort("r1", 1)))))
    empty = convert.CommandAssembler()
    assert empty.feed(over_the_wire(first)) is None
    with pytest.raises(InvalidArgument, match="token_ids is missing"):
        empty.feed(worker_pb2.Command(more_tokens=worker_pb2.MoreTokens()))
    flooded = convert.CommandAssembler()
    assert flooded.feed(over_the_wire(first)) is None
    with pytest.raises(InvalidArgument, match="where 67642 were to come"):
        flooded.feed(worker_pb2.Command(more_tokens=worker_pb2.MoreTokens(token_ids=[1] * 70_000)))


def test_a_big_report_is_split_in_order_and_joins_to_the_same_report():
    report = session.Report(
        step_id=9,
        sent_at_s=1.5,
        heartbeat_seq=4,
        reserved=tuple(
            session.Reserved(f"v{i}", 1, Ticket("inc", i, BlockTable(0, 16, tuple(range(2000)), 30_000)))
            for i in range(100)
        ),
        tokens=tuple(session.TokenOut(f"request-{i % 256}", 1, 0, i, i) for i in range(20_000)),
        ended=(session.Ended("request-1", 1, 0, "length"),),
        load=session.Load(BlockCounts(8, 8)),
    )
    protos = convert.report_to_protos(report)
    assert len(protos) > 2
    assert max(p.ByteSize() for p in protos) <= session.MAX_FRAME_BYTES
    assert joined(protos) == report


@pytest.mark.parametrize("name", ["reserved", "records", "landed"])
def test_the_frames_of_a_big_report_have_before_its_tokens_what_is_read_before_them(name):
    """A reader goes on with a token at once, and reads then what is known of the prompt and of the hand-off."""
    report = session.Report(
        tokens=tuple(session.TokenOut(f"request-{i % 256}", 1, 0, i, i) for i in range(20_000)),
        records=tuple(session.ComputeRecord(f"request-{i}", 1, 0.5, 0.25) for i in range(256)),
        reserved=tuple(session.Reserved(f"request-{i}", 1, None) for i in range(256)),
        landed=tuple(session.Landed(f"request-{i}", 1) for i in range(256)),
    )
    first, *others = convert.report_to_protos(report)
    assert (len(getattr(first, name)), [len(getattr(frame, name)) for frame in others]) == (256, [0] * len(others))
    assert sum(len(frame.tokens) for frame in (first, *others)) == 20_000


SET = [
    ("work.num_prompt_tokens", lambda c: c.prefill.work.ClearField("num_prompt_tokens")),
    ("work.num_prompt_tokens", lambda c: setattr(c.prefill.work, "num_prompt_tokens", 4)),
    ("work.first_index", lambda c: setattr(c.prefill.work, "first_index", 1)),
    ("work.num_token_ids", lambda c: setattr(c.prefill.work, "num_token_ids", 2)),
    ("work.request_id", lambda c: c.prefill.work.ClearField("request_id")),
    ("work.sampling", lambda c: c.prefill.work.ClearField("sampling")),
    ("work.sampling.seed", lambda c: c.prefill.work.sampling.ClearField("seed")),
    ("work.sampling.temperature", lambda c: setattr(c.prefill.work.sampling, "temperature", math.nan)),
    ("work.sampling.top_p", lambda c: setattr(c.prefill.work.sampling, "top_p", 1.5)),
    ("work.sampling.top_p", lambda c: setattr(c.prefill.work.sampling, "top_p", 0.0)),
    ("work.sampling.top_k", lambda c: setattr(c.prefill.work.sampling, "top_k", -1)),
    ("work.max_tokens", lambda c: c.prefill.work.ClearField("max_tokens")),
    ("work.tenant", lambda c: c.prefill.work.ClearField("tenant")),
    ("work.n", lambda c: c.prefill.work.ClearField("n")),
    ("work.deadline_s", lambda c: setattr(c.prefill.work, "deadline_s", -1.0)),
    ("destination.worker_id", lambda c: c.prefill.destination.ClearField("worker_id")),
    ("destination.ticket", lambda c: c.prefill.destination.ClearField("ticket")),
    ("destination.ticket.incarnation", lambda c: c.prefill.destination.ticket.ClearField("incarnation")),
    ("destination.ticket.num_cached_blocks", lambda c: setattr(c.prefill.destination.ticket, "num_cached_blocks", 3)),
    ("destination.ticket.tables", lambda c: c.prefill.destination.ticket.ClearField("tables")),
    (
        "destination.ticket.tables[0].block_size",
        lambda c: c.prefill.destination.ticket.tables[0].ClearField("block_size"),
    ),
    (
        "destination.ticket.tables[0].num_tokens",
        lambda c: setattr(c.prefill.destination.ticket.tables[0], "num_tokens", 33),
    ),
]


@pytest.mark.parametrize(("field", "spoil"), SET)
def test_a_wrong_field_is_named_by_its_path(field, spoil):
    (proto,) = convert.command_to_protos(a_prefill())
    spoil(proto)
    with pytest.raises(InvalidArgument) as caught:
        convert.CommandAssembler().feed(proto)
    assert caught.value.field == f"command.prefill.{field}"
    assert caught.value.field in caught.value.message


def refusal(read, proto) -> KVRelayError:
    with pytest.raises(KVRelayError) as caught:
        read(proto)
    return caught.value


def test_more_than_one_layer_group_is_refused_as_not_built_yet():
    (proto,) = convert.command_to_protos(a_prefill())
    proto.prefill.destination.ticket.tables.append(table_to_proto(BlockTable(1, 16, (1,), 1)))
    error = refusal(convert.CommandAssembler().feed, proto)
    assert type(error) is Unimplemented
    assert error.field == "command.prefill.destination.ticket.tables"


def test_an_unknown_role_and_an_unknown_kind_are_refused_by_name():
    proto = common_pb2.WorkerDescription(role=7, worker_id="w", model=common_pb2.ModelIdentity(), layouts=[{}])
    error = refusal(convert.description_from_proto, proto)
    assert (error.field, error.message) == ("description.role", "description.role has the unknown value 7")
    assert refusal(convert.CommandAssembler().feed, worker_pb2.Command()).field == "command.kind"
    assert refusal(convert.to_decode_from_proto, link_pb2.LinkRequest()).field == "link.kind"
    assert refusal(convert.to_prefill_from_proto, link_pb2.LinkResponse()).field == "link.kind"


def test_wrong_items_of_a_report_are_named_with_their_index():
    tokens = [worker_pb2.TokenOut(request_id="r", token_id=-5), worker_pb2.TokenOut(token_id=1)]
    assert refusal(convert.report_from_proto, worker_pb2.Report(tokens=tokens)).field == "report.tokens[1].request_id"
    assert convert.report_from_proto(worker_pb2.Report(tokens=tokens[:1])).tokens[0].token_id == -5
    ended = [worker_pb2.Ended(request_id="r", reason="tired")]
    assert refusal(convert.report_from_proto, worker_pb2.Report(ended=ended)).field == "report.ended[0].reason"
    failed = [worker_pb2.Ended(request_id="r", reason="failed")]
    assert refusal(convert.report_from_proto, worker_pb2.Report(ended=failed)).field == "report.ended[0].code"
    layout = common_pb2.KVLayout(kv_heads=1, layers=1, block_size=16, head_dim=64, dtype="int3", shards=1)
    assert refusal(layout_from_proto, layout).field == "layout.dtype"


def test_unknown_fields_are_ignored():
    raw = next(iter(convert.command_to_protos(session.Abort("r1", 2)))).abort.SerializeToString()
    newer = worker_pb2.Command(abort=worker_pb2.Abort.FromString(raw + b"\xfa\x3f\x03new"))
    assert convert.CommandAssembler().feed(newer) == session.Abort("r1", 2)


def test_a_deadline_that_has_passed_travels_as_no_time_left():
    (command,) = assemble(convert.command_to_protos(session.Reserve(a_work(deadline_s=-0.25))))
    assert command.work.deadline_s == 0.0


def test_the_report_of_a_step_of_256_tokens_is_cheap():
    tokens = tuple(session.TokenOut(f"req-{i:032x}", 1, 0, 500 + i, 40_000 + i) for i in range(256))
    report = session.Report(step_id=7, sent_at_s=1.0, tokens=tokens)
    best = math.inf
    for _ in range(50):
        started = time.perf_counter()
        convert.report_to_protos(report)
        best = min(best, time.perf_counter() - started)
    assert best < 400e-6
