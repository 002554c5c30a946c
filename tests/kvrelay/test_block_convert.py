"""Block events and lists over the wire: round trips, frames, and what strict reading says about wrong ones."""

from __future__ import annotations

import functools

import pytest

from kvrelay.blocks import BlockCounts, BlockEventKind, BlockEvents, BlockKey, BlockList, BlockRun
from kvrelay.errors import InvalidArgument
from kvrelay.rpc.block_convert import (
    KEYS_A_MESSAGE,
    events_from_proto,
    events_to_proto,
    list_from_protos,
    list_to_protos,
)
from kvrelay.rpc.convert import report_from_proto, report_to_protos
from kvrelay.session import MAX_FRAME_BYTES, Load, Report
from kvrelay.v1 import worker_pb2

STORED, EVICTED, CLEARED = BlockEventKind.STORED, BlockEventKind.EVICTED, BlockEventKind.CLEARED


def key(i: int) -> BlockKey:
    return BlockKey(i.to_bytes(32, "little"))


def keys(*numbers: int) -> tuple[BlockKey, ...]:
    return tuple(map(key, numbers))


def refused(proto: worker_pb2.BlockEvents) -> InvalidArgument:
    with pytest.raises(InvalidArgument) as caught:
        events_from_proto(proto, "events")
    assert caught.value.field in caught.value.message
    return caught.value


def test_events_come_back_as_they_were_sent_and_know_the_next_number() -> None:
    events = BlockEvents(7, (BlockRun(STORED, keys(1, 2)), BlockRun(CLEARED), BlockRun(EVICTED, keys(2))))
    raw = events_to_proto(events).SerializeToString()
    assert events_from_proto(worker_pb2.BlockEvents.FromString(raw), "events") == events
    assert events.next == 11


def test_events_without_a_run_say_only_which_number_comes_next() -> None:
    events = events_from_proto(events_to_proto(BlockEvents(9, ())), "events")
    assert (events, events.next) == (BlockEvents(9, ()), 9)


@pytest.mark.parametrize("num_bytes", [1, 31, 33, 65])
def test_keys_that_are_not_whole_are_refused_by_name(num_bytes: int) -> None:
    run = worker_pb2.BlockRun(kind=worker_pb2.BLOCK_EVENT_KIND_STORED, keys=bytes(num_bytes))
    error = refused(worker_pb2.BlockEvents(first=1, runs=[run]))
    assert error.field == "events.runs[0].keys"
    assert error.message == f"events.runs[0].keys has {num_bytes} bytes, not a multiple of 32"


@pytest.mark.parametrize(
    ("kind", "num_keys"),
    [
        (worker_pb2.BLOCK_EVENT_KIND_CLEARED, 1),
        (worker_pb2.BLOCK_EVENT_KIND_STORED, 0),
        (worker_pb2.BLOCK_EVENT_KIND_EVICTED, 0),
    ],
)
def test_a_clearing_names_no_key_and_any_other_run_names_some(
    kind: worker_pb2.BlockEventKind.ValueType, num_keys: int
) -> None:
    good = worker_pb2.BlockRun(kind=worker_pb2.BLOCK_EVENT_KIND_STORED, keys=bytes(32))
    error = refused(worker_pb2.BlockEvents(first=1, runs=[good, {"kind": kind, "keys": bytes(32 * num_keys)}]))
    assert error.field == "events.runs[1].keys"


@pytest.mark.parametrize("kind", [0, 9])
def test_an_unknown_kind_of_event_is_refused_by_name(kind: int) -> None:
    run = worker_pb2.BlockRun(keys=bytes(32))
    run.kind = kind  # type: ignore[assignment]  # what a newer process may send
    assert refused(worker_pb2.BlockEvents(first=1, runs=[run])).field == "events.runs[0].kind"


def test_events_are_numbered_from_one_on() -> None:
    assert refused(worker_pb2.BlockEvents(first=0)).field == "events.first"


def test_wrong_events_of_a_report_are_named_with_their_index() -> None:
    proto = worker_pb2.Report(block_events=[worker_pb2.BlockEvents(first=1), worker_pb2.BlockEvents()])
    with pytest.raises(InvalidArgument) as caught:
        report_from_proto(proto)
    assert caught.value.field == "report.block_events[1].first"


def test_a_long_history_travels_in_frames_under_the_limit_and_in_order() -> None:
    one_by_one = tuple(BlockRun(EVICTED if i % 2 else STORED, keys(i)) for i in range(KEYS_A_MESSAGE))
    in_one = (BlockRun(STORED, keys(*range(KEYS_A_MESSAGE))),)
    events, first = [], 1
    for runs in (one_by_one, in_one, one_by_one, in_one):
        events.append(BlockEvents(first, runs))
        first = events[-1].next
    report = Report(step_id=3, load=Load(BlockCounts(8, 8)), block_events=tuple(events))
    protos = report_to_protos(report)
    assert len(protos) == 4
    assert max(proto.ByteSize() for proto in protos) <= MAX_FRAME_BYTES
    assert functools.reduce(Report.merge, map(report_from_proto, protos)) == report


@pytest.mark.parametrize(
    ("num_keys", "num_messages"),
    [(0, 1), (1, 1), (KEYS_A_MESSAGE, 1), (KEYS_A_MESSAGE + 1, 2), (3 * KEYS_A_MESSAGE, 3)],
)
def test_a_list_comes_back_as_it_was_sent_even_when_it_is_empty(num_keys: int, num_messages: int) -> None:
    blocks = BlockList(17, keys(*range(num_keys)))
    protos = list(list_to_protos(blocks))
    assert [proto.next for proto in protos] == [17] * num_messages
    assert max(proto.ByteSize() for proto in protos) <= MAX_FRAME_BYTES
    assert list_from_protos(protos) == blocks


def test_a_list_that_says_no_number_or_breaks_a_key_is_refused_by_name() -> None:
    for protos, field in [
        ([], "blocks.next"),
        ([worker_pb2.BlockList(keys=bytes(32))], "blocks.next"),
        ([worker_pb2.BlockList(next=4, keys=bytes(40))], "blocks.keys"),
    ]:
        with pytest.raises(InvalidArgument) as caught:
            list_from_protos(protos)
        assert caught.value.field == field
