"""Penalties, biases, grammars, log-probabilities and priorities over the session: what travels, what is refused."""

from __future__ import annotations

import functools
import math
import time

import pytest

from kvrelay.errors import InvalidArgument
from kvrelay.requests import Logprobs, Priority, RequestId, Sampling, StopRule
from kvrelay.rpc.command_convert import CommandAssembler, command_to_protos
from kvrelay.rpc.report_convert import report_from_proto, report_to_protos
from kvrelay.rpc.sampling_convert import priority_from_proto, sampling_from_proto, sampling_to_proto
from kvrelay.session import MAX_FRAME_BYTES, Command, Prefill, Report, Reserve, TokenOut, Work
from kvrelay.v1 import common_pb2, worker_pb2

MANY_BIASES = tuple((i * 120, -100.0 + i / 8) for i in range(1024))


def a_work(sampling: Sampling, *, num_tokens: int = 3, priority: Priority = Priority.NORMAL) -> Work:
    tokens = tuple(range(2**31, 2**31 + num_tokens))
    stop = StopRule(8, frozenset({2}), min_tokens=5)
    return Work(RequestId("r"), 1, tokens, num_tokens, sampling, stop, priority=priority)


def sent(command: Command) -> Command:
    assembler = CommandAssembler()
    wire = (worker_pb2.Command.FromString(frame.SerializeToString()) for frame in command_to_protos(command))
    (received,) = [c for c in map(assembler.feed, wire) if c is not None]
    return received


@pytest.mark.parametrize("priority", Priority)
def test_a_priority_travels_and_none_is_normal(priority: Priority) -> None:
    command = Reserve(a_work(Sampling(), priority=priority))
    assert sent(command) == command
    assert priority_from_proto(common_pb2.PRIORITY_UNSPECIFIED, "priority") is Priority.NORMAL


def test_a_priority_of_a_newer_version_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"^work\.priority has the unknown value 9$"):
        priority_from_proto(9, "work.priority")


def test_biases_come_back_in_the_order_of_their_ids() -> None:
    asked = Sampling(logit_bias=((7, 1.5), (0, -2.0), (300, 0.25)))
    assert sampling_from_proto(sampling_to_proto(asked)).logit_bias == ((0, -2.0), (7, 1.5), (300, 0.25))


def test_no_logprobs_and_logprobs_of_the_drawn_token_alone_are_two_things() -> None:
    for count in (None, 0, 20):
        assert sampling_from_proto(sampling_to_proto(Sampling(logprobs=count))).logprobs == count


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("min_p", 1.5),
        ("min_p", math.nan),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("presence_penalty", math.nan),
        ("frequency_penalty", -math.inf),
        ("logprobs", -1),
    ],
)
def test_a_field_that_is_out_of_range_is_named(name: str, value: float) -> None:
    proto = sampling_to_proto(Sampling())
    setattr(proto, name, value)
    with pytest.raises(InvalidArgument) as info:
        sampling_from_proto(proto, "work.sampling")
    assert info.value.field == f"work.sampling.{name}"


@pytest.mark.parametrize("name", ["min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_a_field_that_is_missing_is_named(name: str) -> None:
    proto = sampling_to_proto(Sampling())
    proto.ClearField(name)
    with pytest.raises(InvalidArgument, match=rf"^sampling\.{name} is missing$"):
        sampling_from_proto(proto)


def test_a_bias_that_is_no_number_is_named_by_its_token() -> None:
    proto = sampling_to_proto(Sampling())
    proto.logit_bias[41] = math.nan
    with pytest.raises(InvalidArgument) as info:
        sampling_from_proto(proto)
    assert info.value.field == "sampling.logit_bias[41]"


@pytest.mark.parametrize("num_tokens", [1, 30_000, 200_000])
def test_a_long_prompt_with_a_long_grammar_and_many_biases_keeps_to_the_frames(num_tokens: int) -> None:
    """The grammar as it is sent may be twice as long as its source: quotes and line ends are escaped."""
    sampling = Sampling(logit_bias=MANY_BIASES, grammar='x"' * 65_536, logprobs=20, repetition_penalty=1.1)
    command = Prefill(a_work(sampling, num_tokens=num_tokens), None)
    frames = list(command_to_protos(command))
    assert max(frame.ByteSize() for frame in frames) <= MAX_FRAME_BYTES
    assert len(frames) == {1: 1, 30_000: 2, 200_000: 5}[num_tokens]
    assert sent(command) == command


def test_a_report_of_256_tokens_with_20_likeliest_each_is_one_frame() -> None:
    report = Report(step_id=3, tokens=tuple(a_token(i) for i in range(256)))
    (frame,) = report_to_protos(report)
    assert report_from_proto(worker_pb2.Report.FromString(frame.SerializeToString())) == report


def test_merged_reports_of_tokens_with_20_likeliest_each_are_cut_between_tokens() -> None:
    report = Report(step_id=3, tokens=tuple(a_token(i) for i in range(2_000)))
    frames = report_to_protos(report)
    assert len(frames) > 1
    assert max(frame.ByteSize() for frame in frames) <= MAX_FRAME_BYTES
    assert functools.reduce(Report.merge, map(report_from_proto, frames)) == report


def test_tokens_without_logprobs_say_nothing_of_them_on_the_wire() -> None:
    (frame,) = report_to_protos(Report(tokens=(TokenOut(RequestId("r"), 0, 0, 1, 65), a_token(2))))
    assert [token.HasField("logprobs") for token in frame.tokens] == [False, True]


def test_reading_the_report_of_a_step_of_256_tokens_is_cheap() -> None:
    tokens = tuple(TokenOut(RequestId(f"req-{i:032x}"), 1, 0, 500 + i, 40_000 + i) for i in range(256))
    (frame,) = report_to_protos(Report(step_id=7, sent_at_s=1.0, tokens=tokens))
    best = math.inf
    for _ in range(50):
        started = time.perf_counter()
        report_from_proto(frame)
        best = min(best, time.perf_counter() - started)
    assert best < 1e-3


def a_token(index: int) -> TokenOut:
    top = tuple((100_000 + i, -0.1 * i - index) for i in range(20))
    return TokenOut(RequestId("f" * 32), 1, 0, index, 100_000, Logprobs(-0.5, top))
