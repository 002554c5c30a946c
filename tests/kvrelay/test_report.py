"""Two reports that become one say everything that both said."""

from __future__ import annotations

from dataclasses import fields

from kvrelay.blocks import BlockCounts, BlockEventKind, BlockEvents, BlockKey, BlockRun, BlockTable, Ticket
from kvrelay.requests import Incarnation, RequestId
from kvrelay.session import (
    ComputeRecord,
    Ended,
    Landed,
    Load,
    Pushed,
    Refused,
    Report,
    Reserved,
    TokenOut,
)
from kvrelay.steps import StepRecord

STEPS = ["steps", "step_tokens"]


def report_of(name: str, step_id: int) -> Report:
    """One item of every kind, all of the request `name`."""
    request = RequestId(name)
    return Report(
        step_id=step_id,
        sent_at_s=float(step_id),
        heartbeat_seq=step_id,
        reserved=(Reserved(request, 1, Ticket(Incarnation("d"), step_id, BlockTable(0, 16, (1,), 2))),),
        refused=(Refused(request, 1, "ResourceExhausted", "full"),),
        tokens=(TokenOut(request, 1, 0, step_id, 7),),
        landed=(Landed(request, 1),),
        pushed=(Pushed(request, 1, "nixl", 1, 64, 1, 0.1, 0.0),),
        records=(ComputeRecord(request, 1, 0.1, 0.2),),
        ended=(Ended(request, 1, 0, "length"),),
        load=Load(BlockCounts(8, 8), running=step_id),
        block_events=(BlockEvents(step_id, (BlockRun(BlockEventKind.STORED, (BlockKey(bytes([step_id]) * 32),)),)),),
        steps=(StepRecord(step_id, 10.0 + step_id, forward_s=0.5, batch=1),),
        step_tokens=(1,),
        heartbeat_at_s=step_id - 0.5,
    )


def test_a_merged_report_holds_every_item_of_both_in_order_and_the_later_figures() -> None:
    first, second = report_of("a", 1), report_of("b", 2)
    merged = first.merge(second)
    lists = [f.name for f in fields(Report) if isinstance(getattr(first, f.name), tuple)]
    assert lists == ["reserved", "refused", "tokens", "landed", "pushed", "records", "ended", "block_events", *STEPS]
    for name in lists:
        assert getattr(merged, name) == getattr(first, name) + getattr(second, name), name
    assert (merged.step_id, merged.sent_at_s, merged.heartbeat_seq, merged.heartbeat_at_s) == (2, 2.0, 2, 1.5)
    assert merged.load == second.load


def test_a_report_that_says_only_how_busy_the_worker_is_keeps_what_came_before_it() -> None:
    first = report_of("a", 1)
    load = Load(BlockCounts(8, 4, 4), running=5)
    merged = first.merge(Report(load=load))
    assert (merged.step_id, merged.reserved, merged.ended, merged.load) == (1, first.reserved, first.ended, load)
