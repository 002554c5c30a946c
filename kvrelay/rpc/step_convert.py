"""Step records <-> protos: once per step of every worker, so without keyword arguments. Knows no session."""

from __future__ import annotations

import math

from kvrelay.errors import InvalidArgument
from kvrelay.steps import StepRecord
from kvrelay.v1 import worker_pb2


def add_steps(proto: worker_pb2.Report, steps: tuple[StepRecord, ...], step_tokens: tuple[int, ...]) -> None:
    """step_tokens: as in kvrelay.session.Report."""
    for step, num_tokens in zip(steps, step_tokens, strict=True):
        out = proto.steps.add()
        out.step_id = step.step_id
        out.start_s = step.start_s
        out.schedule_s = step.schedule_s
        out.build_s = step.build_s
        out.forward_s = step.forward_s
        out.sample_s = step.sample_s
        out.send_s = step.send_s
        out.batch = step.batch
        out.prefill_tokens = step.prefill_tokens
        out.num_tokens = step.num_tokens
        out.blocks_used = step.blocks_used
        out.transfers = step.transfers
        out.preemptions = step.preemptions
        out.swapped_blocks = step.swapped_blocks
        out.num_report_tokens = num_tokens


def steps_from_proto(proto: worker_pb2.Report, path: str) -> tuple[StepRecord, ...]:
    """InvalidArgument for a time that is none."""
    out: list[StepRecord] = []
    for p in proto.steps:
        step = StepRecord(
            p.step_id,
            p.start_s,
            p.schedule_s,
            p.build_s,
            p.forward_s,
            p.sample_s,
            p.send_s,
            p.batch,
            p.prefill_tokens,
            p.num_tokens,
            p.blocks_used,
            p.transfers,
            p.preemptions,
            p.swapped_blocks,
        )
        if not math.isfinite(step.end_s) or min(step[2:7]) < 0.0:
            where = f"{path}.steps[{len(out)}]"
            raise InvalidArgument(f"{where} has a time that is no time", field=where)
        out.append(step)
    return tuple(out)
