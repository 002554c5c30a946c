"""Steps of a worker over the wire: what each took, and which tokens of a report it made."""

from __future__ import annotations

import functools

import pytest

from kvrelay.errors import InvalidArgument
from kvrelay.requests import RequestId, SessionId
from kvrelay.rpc import command_convert, report_convert
from kvrelay.session import MAX_FRAME_BYTES, Hello, Report, TokenOut
from kvrelay.steps import StepRecord
from kvrelay.v1 import worker_pb2

STEP = StepRecord(7, 1234.5, 0.25, 0.5, 2.0, 0.125, 0.0625, 3, 16, 18, 40, 2, 1, 4)


def over_the_wire(report: Report) -> Report:
    frames = [worker_pb2.Report.FromString(p.SerializeToString()) for p in report_convert.report_to_protos(report)]
    return functools.reduce(Report.merge, map(report_convert.report_from_proto, frames))


def test_a_step_keeps_every_figure() -> None:
    report = Report(
        step_id=7,
        tokens=(TokenOut(RequestId("a"), 0, 0, 1, 2),) * 2,
        steps=(STEP, STEP._replace(step_id=8)),
        step_tokens=(0, 2),
        heartbeat_at_s=99.5,
    )
    assert over_the_wire(report) == report


def test_steps_of_a_report_in_several_frames_come_before_its_tokens_with_all_their_counts() -> None:
    tokens = tuple(TokenOut(RequestId("r" * 30), 0, 0, i, 5) for i in range(8000))
    report = Report(step_id=9, tokens=tokens, steps=(STEP, STEP._replace(step_id=8)), step_tokens=(3000, 5000))
    frames = report_convert.report_to_protos(report)
    assert len(frames) > 1 and all(f.ByteSize() <= MAX_FRAME_BYTES for f in frames)
    assert len(frames[0].steps) == 2
    assert over_the_wire(report) == report


@pytest.mark.parametrize("field", ["start_s", "forward_s", "send_s"])
def test_a_time_that_is_none_is_refused_by_name(field: str) -> None:
    proto = worker_pb2.Report(steps=[worker_pb2.Step(step_id=1)])
    setattr(proto.steps[0], field, float("nan"))
    with pytest.raises(InvalidArgument) as caught:
        report_convert.report_from_proto(proto)
    assert caught.value.field == "report.steps[0]"


def test_a_session_begins_with_whether_steps_are_wanted() -> None:
    for steps in (False, True):
        hello = Hello("c", SessionId("s"), steps=steps)
        [proto] = command_convert.command_to_protos(hello)
        assert proto.hello.steps is steps
