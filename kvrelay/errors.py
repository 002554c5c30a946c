"""Every error a user of KVRelay may see. One table in kvrelay.rpc maps them to gRPC status codes.

KVRelayError
├── InvalidArgument      a field is wrong; names it
├── NotFound             no such model or worker
├── Unauthenticated      no valid credential
├── PermissionDenied     the credential does not allow it
├── ResourceExhausted    a queue or the pool is full, a message is too large; says when to retry
├── Unavailable          no worker, a worker was lost, draining
├── FailedPrecondition   the two sides do not pair
│   └── LayoutMismatch   names the field and both values
├── DeadlineExceeded
├── Cancelled
├── Aborted              attempts used up
├── Unimplemented        the field is known and not built yet; names it
└── Internal             our bug
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

RETRY_S = 1.0
"""When to try again, where nobody knows better."""


@dataclass(frozen=True, slots=True)
class Resource:
    """What an error is about, as google.rpc.ResourceInfo says it. type: `model` or `worker`; name: as it was asked."""

    type: str
    name: str


class KVRelayError(Exception):
    """message is for people; field is the path of the offending field, empty if none.

    resource: what is not there. metadata: what a program may want to know of it, as a limit or a worker, by names.
    """

    retryable: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        *,
        field: str = "",
        retry_after_s: float | None = None,
        resource: Resource | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s
        self.resource = resource
        self.metadata: Mapping[str, str] = metadata or {}

    @property
    def retry_hint_s(self) -> float | None:
        """When to try again, in seconds, as a caller is told it; None: it would not help."""
        return RETRY_S if self.retry_after_s is None and self.retryable else self.retry_after_s


class InvalidArgument(KVRelayError):
    pass


class NotFound(KVRelayError):
    pass


class Unauthenticated(KVRelayError):
    pass


class PermissionDenied(KVRelayError):
    pass


class ResourceExhausted(KVRelayError):
    retryable = True


class Unavailable(KVRelayError):
    retryable = True


class FailedPrecondition(KVRelayError):
    pass


class LayoutMismatch(FailedPrecondition):
    pass


class DeadlineExceeded(KVRelayError):
    pass


class Cancelled(KVRelayError):
    pass


class Aborted(KVRelayError):
    retryable = True


class Unimplemented(KVRelayError):
    pass


class Internal(KVRelayError):
    pass
