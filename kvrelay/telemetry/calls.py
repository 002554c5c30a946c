"""Whose call runs: our id of it and its caller's label, for answers, spans and logs. Knows no protocol.

Both are only looked at by people: nothing is found, cached or decided by them.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from uuid import uuid4

from opentelemetry import trace

from kvrelay.errors import InvalidArgument
from kvrelay.telemetry import names

LABEL_HEADER = "x-request-id"
"""The caller's label, which comes back as it came."""
OWN_HEADER = "x-kvrelay-request-id"
"""Our id: that of Accepted, of logs and of traces."""
MAX_LABEL_BYTES = 256


@dataclass(frozen=True, slots=True)
class CallIds:
    """label: from the header; empty if there was none."""

    request_id: str
    label: str = ""

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What goes back to the caller; of a label that is too long nothing does."""
        own = (OWN_HEADER, self.request_id)
        return ((LABEL_HEADER, self.label), own) if self.label and self._fits else (own,)

    @property
    def _fits(self) -> bool:
        return len(self.label) <= MAX_LABEL_BYTES

    @property
    def words(self) -> str:
        """For a log line."""
        return f"request={self.request_id}" + (f" label={self.label!r}" if self.label and self._fits else "")

    def check(self) -> None:
        """InvalidArgument for a label that is too long. Headers are ASCII: a character is a byte."""
        if not self._fits:
            said = f"{LABEL_HEADER}: must be at most {MAX_LABEL_BYTES} bytes, not {len(self.label)}"
            raise InvalidArgument(said, field=LABEL_HEADER)


_CURRENT: ContextVar[CallIds | None] = ContextVar("kvrelay_call", default=None)


def begin(label: str = "") -> CallIds:
    """A new id, that of the call which runs in this task from now on."""
    ids = CallIds(uuid4().hex, label)
    _CURRENT.set(ids)
    return ids


def current() -> CallIds | None:
    """Of the call that runs in this task; None outside of one."""
    return _CURRENT.get()


def labelled(label: str) -> str:
    """The label of the call that runs: this one of its request, where there is one, else that of its header.

    Logs do not get it by themselves: what a handler schedules inherits its context, and works for others too.
    """
    ids = current()
    label = label or (ids.label if ids is not None else "")
    if label:
        trace.get_current_span().set_attribute(names.LABEL, label)
    return label
