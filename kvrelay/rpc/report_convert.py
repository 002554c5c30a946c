"""Reports (worker -> coordinator) <-> protos, big ones over several frames. Knows no session and no stream.

Tokens are the hot path: their errors build a path only when there is one to report.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvrelay.errors import InvalidArgument
from kvrelay.requests import RequestId
from kvrelay.rpc.block_convert import events_from_proto, events_to_proto
from kvrelay.rpc.description_convert import (
    description_from_proto,
    description_to_proto,
    load_from_proto,
    load_to_proto,
    ticket_from_proto,
    ticket_to_proto,
)
from kvrelay.rpc.fields import number, one_of, text
from kvrelay.rpc.sampling_convert import add_logprobs, logprobs_from_proto
from kvrelay.rpc.step_convert import add_steps, steps_from_proto
from kvrelay.session import (
    MAX_FRAME_BYTES,
    ComputeRecord,
    Ended,
    Landed,
    Pushed,
    Refused,
    Report,
    Reserved,
    TokenOut,
)
from kvrelay.v1 import worker_pb2

FRAME_MARGIN = 256
"""Room for the headers around a frame's content."""
ITEM_HEADER = 8
"""At most so many bytes of tag and length stand before an item of a list (items are under 256 MiB)."""
END_REASONS = ("stop", "length", "aborted", "failed")


def report_to_protos(report: Report) -> list[worker_pb2.Report]:
    """The frames of one report, in order: normally one. Merging what a reader makes of them gives `report` again."""
    whole = _report_to_proto(report)
    if whole.ByteSize() <= MAX_FRAME_BYTES - FRAME_MARGIN:
        return [whole]
    return list(_split(whole))


def _report_to_proto(report: Report) -> worker_pb2.Report:
    proto = worker_pb2.Report(
        step_id=report.step_id,
        sent_at_s=report.sent_at_s,
        heartbeat_seq=report.heartbeat_seq,
        heartbeat_at_s=report.heartbeat_at_s,
    )
    add_steps(proto, report.steps, report.step_tokens)
    if report.welcome is not None:
        proto.welcome.CopyFrom(description_to_proto(report.welcome))
    if report.load is not None:
        proto.load.CopyFrom(load_to_proto(report.load))
    _add_tokens(proto, report.tokens)
    for reserved in report.reserved:
        proto.reserved.add(
            request_id=reserved.request_id,
            attempt=reserved.attempt,
            ticket=None if reserved.ticket is None else ticket_to_proto(reserved.ticket),
        )
    for landed in report.landed:
        proto.landed.add(request_id=landed.request_id, attempt=landed.attempt)
    proto.refused.extend(map(_refused_to_proto, report.refused))
    proto.pushed.extend(map(_pushed_to_proto, report.pushed))
    proto.records.extend(map(_record_to_proto, report.records))
    proto.ended.extend(map(_ended_to_proto, report.ended))
    proto.block_events.extend(map(events_to_proto, report.block_events))
    return proto


def _add_tokens(proto: worker_pb2.Report, tokens: tuple[TokenOut, ...]) -> None:
    """Assignments cost half of what keyword arguments cost, and zeros need none."""
    add = proto.tokens.add
    for request_id, attempt, sequence, index, token_id, logprobs in tokens:
        out = add()
        out.request_id = request_id
        out.attempt = attempt
        if sequence:
            out.sequence = sequence
        out.index = index
        out.token_id = token_id
        if logprobs is not None:
            add_logprobs(out.logprobs, logprobs)


def _split(whole: worker_pb2.Report) -> Iterator[worker_pb2.Report]:
    """Frames in the order in which a report is read: the first carries welcome and heartbeat, the last the load."""
    room = MAX_FRAME_BYTES - FRAME_MARGIN
    frame = worker_pb2.Report(
        step_id=whole.step_id,
        sent_at_s=whole.sent_at_s,
        heartbeat_seq=whole.heartbeat_seq,
        heartbeat_at_s=whole.heartbeat_at_s,
    )
    if whole.HasField("welcome"):
        frame.welcome.CopyFrom(whole.welcome)
    size = frame.ByteSize()
    for name in ("steps", "reserved", "refused", "records", "landed", "tokens", "pushed", "ended", "block_events"):
        for item in getattr(whole, name):
            item_size = item.ByteSize() + ITEM_HEADER
            if size + item_size > room and size:
                yield frame
                frame = worker_pb2.Report(step_id=whole.step_id, sent_at_s=whole.sent_at_s)
                size = frame.ByteSize()
            getattr(frame, name).add().CopyFrom(item)
            size += item_size
    if whole.HasField("load"):
        if size + whole.load.ByteSize() > room:
            yield frame
            frame = worker_pb2.Report(step_id=whole.step_id, sent_at_s=whole.sent_at_s)
        frame.load.CopyFrom(whole.load)
    yield frame


def report_from_proto(proto: worker_pb2.Report, path: str = "report") -> Report:
    """One frame's report; InvalidArgument names the path of what is wrong."""
    welcome = description_from_proto(proto.welcome, f"{path}.welcome") if proto.HasField("welcome") else None
    load = load_from_proto(proto.load, f"{path}.load") if proto.HasField("load") else None
    return Report(
        step_id=proto.step_id,
        sent_at_s=number(proto.sent_at_s, f"{path}.sent_at_s"),
        heartbeat_seq=proto.heartbeat_seq,
        welcome=welcome,
        reserved=tuple(_reserved_from_proto(p, f"{path}.reserved[{i}]") for i, p in enumerate(proto.reserved)),
        refused=tuple(_refused_from_proto(p, f"{path}.refused[{i}]") for i, p in enumerate(proto.refused)),
        tokens=_tokens_from_proto(proto, path),
        landed=tuple(_landed_from_proto(p, f"{path}.landed[{i}]") for i, p in enumerate(proto.landed)),
        pushed=tuple(_pushed_from_proto(p, f"{path}.pushed[{i}]") for i, p in enumerate(proto.pushed)),
        records=tuple(_record_from_proto(p, f"{path}.records[{i}]") for i, p in enumerate(proto.records)),
        ended=tuple(_ended_from_proto(p, f"{path}.ended[{i}]") for i, p in enumerate(proto.ended)),
        load=load,
        block_events=tuple(events_from_proto(p, f"{path}.block_events[{i}]") for i, p in enumerate(proto.block_events)),
        steps=steps_from_proto(proto, path) if proto.steps else (),
        step_tokens=tuple(step.num_report_tokens for step in proto.steps),
        heartbeat_at_s=number(proto.heartbeat_at_s, f"{path}.heartbeat_at_s"),
    )


def _tokens_from_proto(proto: worker_pb2.Report, path: str) -> tuple[TokenOut, ...]:
    """Token ids pass as they are: one outside the vocabulary ends its own stream, not the session."""
    out: list[TokenOut] = []
    for token in proto.tokens:
        request_id = token.request_id
        if not request_id:
            where = f"{path}.tokens[{len(out)}].request_id"
            raise InvalidArgument(f"{where} is missing or empty", field=where)
        logprobs = logprobs_from_proto(token.logprobs) if token.HasField("logprobs") else None
        of = RequestId(request_id)
        out.append(TokenOut(of, token.attempt, token.sequence, token.index, token.token_id, logprobs))
    return tuple(out)


def _reserved_from_proto(proto: worker_pb2.Reserved, path: str) -> Reserved:
    request_id = RequestId(text(proto.request_id, f"{path}.request_id"))
    ticket = ticket_from_proto(proto.ticket, f"{path}.ticket") if proto.HasField("ticket") else None
    return Reserved(request_id, proto.attempt, ticket)


def _refused_to_proto(refused: Refused) -> worker_pb2.Refused:
    return worker_pb2.Refused(
        request_id=refused.request_id,
        attempt=refused.attempt,
        code=refused.code,
        message=refused.message,
        field=refused.field,
        retry_after_s=refused.retry_after_s,
    )


def _refused_from_proto(proto: worker_pb2.Refused, path: str) -> Refused:
    retry = number(proto.retry_after_s, f"{path}.retry_after_s") if proto.HasField("retry_after_s") else None
    return Refused(
        request_id=RequestId(text(proto.request_id, f"{path}.request_id")),
        attempt=proto.attempt,
        code=text(proto.code, f"{path}.code"),
        message=proto.message,
        field=proto.field,
        retry_after_s=retry,
    )


def _landed_from_proto(proto: worker_pb2.Landed, path: str) -> Landed:
    return Landed(RequestId(text(proto.request_id, f"{path}.request_id")), proto.attempt)


def _pushed_to_proto(pushed: Pushed) -> worker_pb2.Pushed:
    return worker_pb2.Pushed(
        request_id=pushed.request_id,
        attempt=pushed.attempt,
        transport=pushed.transport,
        num_blocks=pushed.num_blocks,
        num_bytes=pushed.num_bytes,
        num_parts=pushed.num_parts,
        seconds=pushed.seconds,
        exposed_s=pushed.exposed_s,
    )


def _pushed_from_proto(proto: worker_pb2.Pushed, path: str) -> Pushed:
    return Pushed(
        request_id=RequestId(text(proto.request_id, f"{path}.request_id")),
        attempt=proto.attempt,
        transport=text(proto.transport, f"{path}.transport"),
        num_blocks=proto.num_blocks,
        num_bytes=proto.num_bytes,
        num_parts=proto.num_parts,
        seconds=number(proto.seconds, f"{path}.seconds"),
        exposed_s=number(proto.exposed_s, f"{path}.exposed_s"),
    )


def _record_to_proto(record: ComputeRecord) -> worker_pb2.ComputeRecord:
    chunks = [worker_pb2.ChunkRecord(offset_s=o, seconds=s, num_tokens=n) for o, s, n in record.chunks]
    return worker_pb2.ComputeRecord(
        request_id=record.request_id,
        attempt=record.attempt,
        queued_s=record.queued_s,
        active_s=record.active_s,
        chunks=chunks,
        num_cached_tokens=record.num_cached_tokens,
    )


def _record_from_proto(proto: worker_pb2.ComputeRecord, path: str) -> ComputeRecord:
    chunks = []
    for i, chunk in enumerate(proto.chunks):
        offset = number(chunk.offset_s, f"{path}.chunks[{i}].offset_s")
        chunks.append((offset, number(chunk.seconds, f"{path}.chunks[{i}].seconds"), chunk.num_tokens))
    return ComputeRecord(
        request_id=RequestId(text(proto.request_id, f"{path}.request_id")),
        attempt=proto.attempt,
        queued_s=number(proto.queued_s, f"{path}.queued_s"),
        active_s=number(proto.active_s, f"{path}.active_s"),
        chunks=tuple(chunks),
        num_cached_tokens=proto.num_cached_tokens,
    )


def _ended_to_proto(ended: Ended) -> worker_pb2.Ended:
    return worker_pb2.Ended(
        request_id=ended.request_id,
        attempt=ended.attempt,
        sequence=ended.sequence,
        reason=ended.reason,
        code=ended.code,
        message=ended.message,
    )


def _ended_from_proto(proto: worker_pb2.Ended, path: str) -> Ended:
    reason = one_of(proto.reason, END_REASONS, f"{path}.reason")
    return Ended(
        request_id=RequestId(text(proto.request_id, f"{path}.request_id")),
        attempt=proto.attempt,
        sequence=proto.sequence,
        reason=reason,
        code=text(proto.code, f"{path}.code") if reason == "failed" else proto.code,
        message=proto.message,
    )
