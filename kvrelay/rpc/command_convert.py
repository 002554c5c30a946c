"""Commands (coordinator -> worker) <-> protos, long prompts over several frames. Knows no session and no stream."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import assert_never

from kvrelay.errors import InvalidArgument
from kvrelay.requests import RequestId, SessionId, StopRule, WorkerId
from kvrelay.rpc.description_convert import ticket_from_proto, ticket_to_proto
from kvrelay.rpc.fields import at_least, at_most, number, present, text
from kvrelay.rpc.sampling_convert import (
    PRIORITY_NUMBERS,
    priority_from_proto,
    sampling_from_proto,
    sampling_to_proto,
)
from kvrelay.session import (
    MAX_FRAME_BYTES,
    Abort,
    Command,
    Destination,
    Drain,
    Heartbeat,
    Hello,
    Prefill,
    Reserve,
    Start,
    Work,
)
from kvrelay.v1 import worker_pb2

TOKEN_BYTES = 5
"""A uint32 takes at most this many bytes on the wire."""
FRAME_MARGIN = 256
"""Room for the headers around a frame's content."""


def command_to_protos(command: Command) -> Iterable[worker_pb2.Command]:
    """The frames of one command, in order and to be sent with nothing between them.

    Those of a long prompt are made one at a time: who waits for each to be sent holds nobody else for all of them.
    """
    match command:
        case Hello():
            hello = worker_pb2.Hello(
                coordinator_id=command.coordinator_id,
                session_id=command.session_id,
                protocol_version=command.protocol_version,
                steps=command.steps,
            )
            return [worker_pb2.Command(hello=hello)]
        case Heartbeat():
            beat = worker_pb2.Heartbeat(seq=command.seq, sent_at_s=command.sent_at_s)
            return [worker_pb2.Command(heartbeat=beat)]
        case Prefill():
            return _split(worker_pb2.Command(prefill=_prefill_to_proto(command)), command.work.token_ids)
        case Reserve():
            reserve = worker_pb2.Reserve(work=_work_to_proto(command.work), local_prefill=command.local_prefill)
            return _split(worker_pb2.Command(reserve=reserve), command.work.token_ids)
        case Start():
            start = worker_pb2.Start(
                request_id=command.request_id, attempt=command.attempt, first_tokens=command.first_tokens
            )
            return [worker_pb2.Command(start=start)]
        case Abort():
            abort = worker_pb2.Abort(request_id=command.request_id, attempt=command.attempt, sequence=command.sequence)
            return [worker_pb2.Command(abort=abort)]
        case Drain():
            return [worker_pb2.Command(drain=worker_pb2.Drain(grace_s=command.grace_s))]
        case _ as never:
            assert_never(never)


class CommandAssembler:
    """Joins the frames of one session's commands; one per session, fed in order of arrival."""

    def __init__(self) -> None:
        self._pending: worker_pb2.Command | None = None

    def feed(self, proto: worker_pb2.Command) -> Command | None:
        """The command that this frame completes, or None while token ids are still to come.

        InvalidArgument names the path of what is wrong; the session should end then.
        """
        pending, self._pending = self._pending, None
        if proto.WhichOneof("kind") == "more_tokens":
            proto = _join(pending, proto.more_tokens)
        elif pending is not None:
            raise InvalidArgument(
                "command.more_tokens is missing: a command is incomplete", field="command.more_tokens"
            )
        if _tokens_missing(proto):
            self._pending = proto
            return None
        return _command_from_proto(proto)


def _work_to_proto(work: Work) -> worker_pb2.Work:
    """Everything but the token ids, which `_split` spreads over frames. A deadline in the past travels as 0."""
    return worker_pb2.Work(
        request_id=work.request_id,
        attempt=work.attempt,
        num_token_ids=len(work.token_ids),
        num_prompt_tokens=work.num_prompt_tokens,
        first_index=work.first_index,
        sampling=sampling_to_proto(work.sampling),
        max_tokens=work.stop.max_tokens,
        stop_token_ids=sorted(work.stop.stop_token_ids),
        tenant=work.tenant,
        cache_salt=work.cache_salt,
        n=work.n,
        deadline_s=None if work.deadline_s is None else max(0.0, work.deadline_s),
        traceparent=work.traceparent,
        no_prefix_cache=not work.prefix_cache,
        min_tokens=work.stop.min_tokens,
        grammar=work.sampling.grammar,
        priority=PRIORITY_NUMBERS[work.priority],
    )


def _prefill_to_proto(prefill: Prefill) -> worker_pb2.Prefill:
    proto = worker_pb2.Prefill(work=_work_to_proto(prefill.work))
    if prefill.destination is not None:
        proto.destination.worker_id = prefill.destination.worker_id
        proto.destination.address = prefill.destination.address
        proto.destination.ticket.CopyFrom(ticket_to_proto(prefill.destination.ticket))
    return proto


def _split(command: worker_pb2.Command, token_ids: tuple[int, ...]) -> Iterator[worker_pb2.Command]:
    """Puts as many token ids into `command` as its frame holds, the rest into MoreTokens frames."""
    room = max(0, MAX_FRAME_BYTES - FRAME_MARGIN - command.ByteSize()) // TOKEN_BYTES
    _work_of(command).token_ids.extend(token_ids[:room])
    each = (MAX_FRAME_BYTES - FRAME_MARGIN) // TOKEN_BYTES
    yield command
    for start in range(room, len(token_ids), each):
        more = worker_pb2.MoreTokens(token_ids=token_ids[start : start + each])
        yield worker_pb2.Command(more_tokens=more)


def _work_of(command: worker_pb2.Command) -> worker_pb2.Work:
    return command.prefill.work if command.WhichOneof("kind") == "prefill" else command.reserve.work


def _join(pending: worker_pb2.Command | None, more: worker_pb2.MoreTokens) -> worker_pb2.Command:
    path = "command.more_tokens"
    if pending is None:
        raise InvalidArgument(f"{path} continues no command", field=path)
    if not more.token_ids:
        raise InvalidArgument(f"{path}.token_ids is missing or empty", field=f"{path}.token_ids")
    work = _work_of(pending)
    left = work.num_token_ids - len(work.token_ids)
    if len(more.token_ids) > left:
        message = f"{path}.token_ids holds {len(more.token_ids)} token ids where {left} were to come"
        raise InvalidArgument(message, field=f"{path}.token_ids")
    work.token_ids.extend(more.token_ids)
    return pending


def _tokens_missing(command: worker_pb2.Command) -> bool:
    if command.WhichOneof("kind") not in ("prefill", "reserve"):
        return False
    work = _work_of(command)
    return len(work.token_ids) < work.num_token_ids


def _command_from_proto(proto: worker_pb2.Command, path: str = "command") -> Command:
    kind = proto.WhichOneof("kind")
    match kind:
        case "hello":
            return _hello_from_proto(proto.hello, f"{path}.hello")
        case "heartbeat":
            return Heartbeat(proto.heartbeat.seq, number(proto.heartbeat.sent_at_s, f"{path}.heartbeat.sent_at_s"))
        case "prefill":
            return _prefill_from_proto(proto.prefill, f"{path}.prefill")
        case "reserve":
            present(proto.reserve, "work", f"{path}.reserve")
            work = _work_from_proto(proto.reserve.work, f"{path}.reserve.work")
            return Reserve(work, proto.reserve.local_prefill)
        case "start":
            return _start_from_proto(proto.start, f"{path}.start")
        case "abort":
            request_id = RequestId(text(proto.abort.request_id, f"{path}.abort.request_id"))
            sequence = proto.abort.sequence if proto.abort.HasField("sequence") else None
            return Abort(request_id, proto.abort.attempt, sequence)
        case "drain":
            return Drain(number(proto.drain.grace_s, f"{path}.drain.grace_s"))
        case "more_tokens" | None:
            raise InvalidArgument(f"{path}.kind is missing, or a command newer than this version", field=f"{path}.kind")
        case _ as never:
            assert_never(never)


def _hello_from_proto(proto: worker_pb2.Hello, path: str) -> Hello:
    return Hello(
        coordinator_id=text(proto.coordinator_id, f"{path}.coordinator_id"),
        session_id=SessionId(text(proto.session_id, f"{path}.session_id")),
        protocol_version=at_least(proto.protocol_version, 1, f"{path}.protocol_version"),
        steps=proto.steps,
    )


def _prefill_from_proto(proto: worker_pb2.Prefill, path: str) -> Prefill:
    present(proto, "work", path)
    work = _work_from_proto(proto.work, f"{path}.work")
    if not proto.HasField("destination"):
        return Prefill(work, None)
    target, where = proto.destination, f"{path}.destination"
    present(target, "ticket", where)
    destination = Destination(
        worker_id=WorkerId(text(target.worker_id, f"{where}.worker_id")),
        address=text(target.address, f"{where}.address"),
        ticket=ticket_from_proto(target.ticket, f"{where}.ticket"),
    )
    return Prefill(work, destination)


def _start_from_proto(proto: worker_pb2.Start, path: str) -> Start:
    if not proto.first_tokens:
        raise InvalidArgument(f"{path}.first_tokens is missing or empty", field=f"{path}.first_tokens")
    request_id = RequestId(text(proto.request_id, f"{path}.request_id"))
    return Start(request_id, proto.attempt, tuple(proto.first_tokens))


def _work_from_proto(proto: worker_pb2.Work, path: str) -> Work:
    present(proto, "sampling", path)
    known = len(proto.token_ids)
    if known != proto.num_token_ids:
        message = f"{path}.num_token_ids is {proto.num_token_ids} but {known} token ids came"
        raise InvalidArgument(message, field=f"{path}.num_token_ids")
    at_least(proto.num_prompt_tokens, 1, f"{path}.num_prompt_tokens")
    prompt = at_most(proto.num_prompt_tokens, known, f"{path}.num_prompt_tokens")
    if proto.first_index != known - prompt:
        message = f"{path}.first_index is {proto.first_index}, not {known} known - {prompt} prompt tokens"
        raise InvalidArgument(message, field=f"{path}.first_index")
    deadline = number(proto.deadline_s, f"{path}.deadline_s") if proto.HasField("deadline_s") else None
    max_tokens = at_least(proto.max_tokens, 1, f"{path}.max_tokens")
    return Work(
        request_id=RequestId(text(proto.request_id, f"{path}.request_id")),
        attempt=proto.attempt,
        token_ids=tuple(proto.token_ids),
        num_prompt_tokens=prompt,
        sampling=sampling_from_proto(proto.sampling, f"{path}.sampling", proto.grammar),
        stop=StopRule(max_tokens, frozenset(proto.stop_token_ids), proto.min_tokens),
        tenant=text(proto.tenant, f"{path}.tenant"),
        cache_salt=proto.cache_salt,
        n=at_least(proto.n, 1, f"{path}.n"),
        deadline_s=deadline,
        traceparent=proto.traceparent,
        prefix_cache=not proto.no_prefix_cache,
        priority=priority_from_proto(proto.priority, f"{path}.priority"),
    )
