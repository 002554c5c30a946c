"""What an error of KVRelay is over HTTP: status, headers and OpenAI's error body. Knows no routes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

from kvrelay import errors
from kvrelay.errors import KVRelayError

Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Meaning:
    """code "": none, JSON's null."""

    status: int
    kind: str
    code: str = ""


INVALID = "invalid_request_error"
SERVER = "server_error"
MEANING: dict[type[KVRelayError], Meaning] = {
    errors.InvalidArgument: Meaning(400, INVALID, "invalid_value"),
    errors.Unimplemented: Meaning(400, INVALID, "unsupported_parameter"),
    errors.Unauthenticated: Meaning(401, "authentication_error", "invalid_api_key"),
    errors.PermissionDenied: Meaning(403, "permission_error"),
    errors.NotFound: Meaning(404, INVALID, "model_not_found"),
    errors.ResourceExhausted: Meaning(429, "rate_limit_error", "rate_limit_exceeded"),
    errors.Cancelled: Meaning(499, "cancelled", "client_closed_request"),
    errors.Internal: Meaning(500, SERVER, "internal_error"),
    errors.FailedPrecondition: Meaning(500, SERVER, "failed_precondition"),
    errors.Aborted: Meaning(503, SERVER, "aborted"),
    errors.Unavailable: Meaning(503, SERVER, "unavailable"),
    errors.DeadlineExceeded: Meaning(504, "timeout_error", "deadline_exceeded"),
}
"""Aborted says that workers were lost too often: nothing of the caller's doing, and worth another try."""

PARAM_OF = {
    "text": "prompt",
    "tokens.ids": "prompt",
    "chat.messages": "messages",
    "chat": "messages",
    "token_ids": "tokens",
    "truncate_prompt": "truncate_prompt_tokens",
    "include_stop": "include_stop_str_in_output",
    "client_request_id": "user",
}
"""Paths in GenerateRequest that OpenAI's protocol calls otherwise, longer ones before those that they begin with."""
SAMPLING = "sampling."


class Rejected(KVRelayError):
    """Refused by HTTP's own rules, with a status that no error of ours stands for."""

    def __init__(self, status: int, message: str, code: str, *, field: str = "") -> None:
        super().__init__(message, field=field)
        self.meaning = Meaning(status, INVALID, code)


def meaning_of(error: KVRelayError) -> Meaning:
    if isinstance(error, Rejected):
        return error.meaning
    return next((MEANING[kind] for kind in type(error).__mro__ if kind in MEANING), MEANING[errors.Internal])


def param_of(field: str, names: Mapping[str, str]) -> str:
    """What the caller wrote for a field of GenerateRequest. names: those of this request, which win."""
    field = field.removeprefix(SAMPLING)
    for ours, theirs in (*names.items(), *PARAM_OF.items()):
        if field == ours or field.startswith((f"{ours}.", f"{ours}[")):
            return theirs + field.removeprefix(ours)
    return field


def error_body(error: KVRelayError, names: Mapping[str, str] | None = None) -> str:
    """{"error": {message, type, param, code}} as JSON; the message speaks of the field as the caller wrote it."""
    meaning, param, message = meaning_of(error), param_of(error.field, names or {}), error.message
    if error.field and message.startswith(f"{error.field}:"):
        message = param + message.removeprefix(error.field)
    about = {"message": message, "type": meaning.kind, "param": param or None, "code": meaning.code or None}
    return json.dumps({"error": about})


def retry_headers(error: KVRelayError) -> Headers:
    """When to try again, in whole seconds for everybody and in ms for the openai client; none for what is final."""
    seconds = error.retry_hint_s
    if seconds is None:
        return []
    return [
        (b"retry-after", b"%d" % max(1, math.ceil(seconds))),
        (b"retry-after-ms", b"%d" % max(1, round(seconds * 1000))),
    ]
