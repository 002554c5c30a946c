"""The one table between the error tree and gRPC status codes, and rich statuses both ways. Knows no service.

Unknown exceptions become Internal: their message stays in the log, the caller gets none of it.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast

import grpc
from google.protobuf.any_pb2 import Any
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from kvrelay import errors
from kvrelay.errors import KVRelayError, Resource

Detail: TypeAlias = (
    error_details_pb2.ErrorInfo
    | error_details_pb2.BadRequest
    | error_details_pb2.ResourceInfo
    | error_details_pb2.RetryInfo
)
DETAILS: tuple[type[Detail], ...] = (
    error_details_pb2.ErrorInfo,
    error_details_pb2.BadRequest,
    error_details_pb2.ResourceInfo,
    error_details_pb2.RetryInfo,
)
DOMAIN = "kvrelay"
"""ErrorInfo.domain: the reason is then the name of a class of kvrelay.errors."""

MOST_MESSAGE_BYTES = 700
MOST_NAME_BYTES = 256
"""A message stands in the status up to four times, and clients refuse headers of more than 8 KB."""

STATUS_TABLE: dict[type[KVRelayError], grpc.StatusCode] = {
    errors.InvalidArgument: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NotFound: grpc.StatusCode.NOT_FOUND,
    errors.Unauthenticated: grpc.StatusCode.UNAUTHENTICATED,
    errors.PermissionDenied: grpc.StatusCode.PERMISSION_DENIED,
    errors.ResourceExhausted: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,
    errors.FailedPrecondition: grpc.StatusCode.FAILED_PRECONDITION,
    errors.LayoutMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,
    errors.Cancelled: grpc.StatusCode.CANCELLED,
    errors.Aborted: grpc.StatusCode.ABORTED,
    errors.Unimplemented: grpc.StatusCode.UNIMPLEMENTED,
    errors.Internal: grpc.StatusCode.INTERNAL,
}
ERROR_OF_CODE: dict[grpc.StatusCode, type[KVRelayError]] = {
    **{code: kind for kind, code in STATUS_TABLE.items() if kind is not errors.LayoutMismatch},
    grpc.StatusCode.OUT_OF_RANGE: errors.InvalidArgument,
    grpc.StatusCode.ALREADY_EXISTS: errors.FailedPrecondition,
    grpc.StatusCode.DATA_LOSS: errors.Internal,
    grpc.StatusCode.UNKNOWN: errors.Internal,
    grpc.StatusCode.OK: errors.Internal,
}
"""The class for a code alone; codes we never send come from proxies and foreign servers. OK is no error: our bug."""
ERROR_OF_NAME = {kind.__name__: kind for kind in STATUS_TABLE}

IN_WORDS = (
    (
        r"failed to connect to all addresses; last error: \w+: (?:ipv[46]:|unix:)?(?P<who>[^ ]+): (?P<why>.*)",
        "cannot reach {who}: {why}",
    ),
    (r"errors resolving (?P<who>[^ ]+): .*: (?P<why>[^:]+?)\]?", "cannot find the host of {who}: {why}"),
    (r"Deadline Exceeded", "the deadline passed"),
)
"""What gRPC itself says where nobody answered -> what we say of it."""

log = logging.getLogger(__name__)


def code_of(error: KVRelayError) -> grpc.StatusCode:
    """The status code of an error; KVRelayError itself, never raised by us, counts as Internal."""
    for kind in type(error).__mro__:
        if kind in STATUS_TABLE:
            return STATUS_TABLE[kind]
    return grpc.StatusCode.INTERNAL


def as_error(error: BaseException, whose: str = "") -> KVRelayError:
    """The error a caller may see: ours as it is, any other as an Internal that says nothing, logged with traceback.

    whose: call it was, for the log.
    """
    if isinstance(error, KVRelayError):
        if isinstance(error, errors.Internal):
            log.error("internal error %s", whose, exc_info=error)
        return error
    log.error("unexpected exception %s", whose, exc_info=error)
    return errors.Internal("internal error; see the server's log")


def to_status(error: KVRelayError) -> status_pb2.Status:
    """A google.rpc.Status with what docs/errors.md promises: ErrorInfo always, the others where they say something."""
    number: int = code_of(error).value[0]
    message = _clipped(error.message, MOST_MESSAGE_BYTES)
    status = status_pb2.Status(code=number, message=message)
    for detail in _details_of(error, message):
        packed = Any()
        packed.Pack(detail)
        status.details.append(packed)
    return status


def _clipped(text: str, most: int) -> str:
    """At most so many bytes of UTF-8, and what UTF-8 cannot say left out: a status is for a header of a few KB."""
    raw = text.encode("utf-8", "replace")
    return raw.decode() if len(raw) <= most else raw[: most - 3].decode("utf-8", "ignore") + "..."


def _details_of(error: KVRelayError, message: str) -> Iterator[Detail]:
    metadata = {key: _clipped(value, MOST_NAME_BYTES) for key, value in error.metadata.items()}
    yield error_details_pb2.ErrorInfo(reason=type(error).__name__, domain=DOMAIN, metadata=metadata)
    if error.field:
        field = _clipped(error.field, MOST_NAME_BYTES)
        violation = error_details_pb2.BadRequest.FieldViolation(field=field, description=message)
        yield error_details_pb2.BadRequest(field_violations=[violation])
    resource, retry_s = error.resource, error.retry_hint_s
    if resource is not None:
        yield error_details_pb2.ResourceInfo(
            resource_type=resource.type,
            resource_name=_clipped(resource.name, MOST_NAME_BYTES),
            description=message,
        )
    if retry_s is not None:
        delay = Duration()
        delay.FromNanoseconds(max(0, round(retry_s * 1e9)))
        yield error_details_pb2.RetryInfo(retry_delay=delay)


@dataclass(frozen=True, slots=True)
class Ending:
    """How a call ends that did not go well: a grpc.Status."""

    code: grpc.StatusCode
    details: str
    trailing_metadata: tuple[tuple[str, str | bytes], ...]


def to_grpc_status(error: KVRelayError, ids: Sequence[tuple[str, str]] = ()) -> grpc.Status:
    """What `context.abort_with_status` takes, which forgets all trailing metadata but the status's own: hence ids."""
    status: grpc.Status = rpc_status.to_status(to_status(error))
    return with_ids(status, ids) if ids else status


def with_ids(status: grpc.Status, ids: Sequence[tuple[str, str]]) -> grpc.Status:
    """The same status with more trailing metadata."""
    return cast(grpc.Status, Ending(status.code, status.details, (*status.trailing_metadata, *ids)))


def from_rpc_error(error: grpc.RpcError) -> KVRelayError:
    """The error of ours that a failed call stands for: class by name or code, the rest from the details."""
    call = error if isinstance(error, grpc.Call | grpc.aio.AioRpcError) else None
    if call is None:
        return errors.Internal(f"the call failed without a status: {type(error).__name__}")
    code, message = call.code(), in_words(call.details() or "")
    kind, field, retry = ERROR_OF_CODE.get(code, errors.Internal), "", None
    resource, metadata = None, {}
    for detail in _unpack(call):
        match detail:
            case error_details_pb2.ErrorInfo() if detail.domain == DOMAIN:
                kind, metadata = ERROR_OF_NAME.get(detail.reason, kind), dict(detail.metadata)
            case error_details_pb2.BadRequest() if detail.field_violations:
                field = detail.field_violations[0].field
            case error_details_pb2.ResourceInfo():
                resource = Resource(detail.resource_type, detail.resource_name)
            case error_details_pb2.RetryInfo():
                retry = detail.retry_delay.ToNanoseconds() / 1e9
    return kind(message, field=field, retry_after_s=retry, resource=resource, metadata=metadata)


def from_write_error(error: grpc.RpcError | asyncio.InvalidStateError) -> KVRelayError:
    """As `from_rpc_error`, of a write: grpc.aio says with InvalidStateError that the call was over before."""
    return from_rpc_error(error) if isinstance(error, grpc.RpcError) else errors.Unavailable("the call is over")


def in_words(details: str) -> str:
    """gRPC's own words for an address that nobody answers at, short; all else as it is."""
    for pattern, words in IN_WORDS:
        if found := re.fullmatch(pattern, details, re.DOTALL):
            return words.format(**found.groupdict()).replace(": Failed to connect to remote host: ", ": ")
    return details


def _unpack(call: grpc.Call | grpc.aio.AioRpcError) -> Iterator[Detail]:
    """The details we understand; a status that is broken or contradicts its call has none."""
    try:
        status = rpc_status.from_call(call)
    except (ValueError, DecodeError):
        return
    for packed in status.details if status is not None else ():
        for kind in DETAILS:
            detail = kind()
            if packed.Is(kind.DESCRIPTOR) and packed.Unpack(detail):
                yield detail
