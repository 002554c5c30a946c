"""POST /v1/chat/completions: from its body to what is asked for. What the model writes is not searched for calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from coordinator.http.completions import options
from coordinator.http.fields import HARMLESS, common
from coordinator.http.generation import Asked
from coordinator.http.parsing import parse, refuse, wrong
from coordinator.http.prompts import messages_of
from coordinator.http.schemas import ChatCompletions, Tokenize
from coordinator.http.shapes import CHAT
from coordinator.raw import RawRequest
from kvrelay.errors import Unimplemented

REFUSED = (
    "continue_final_message",
    "echo",
    "add_special_tokens",
    "chat_template",
    "documents",
    "functions",
    "function_call",
    "modalities",
    "audio",
    "prediction",
    "web_search_options",
)


TEMPLATE_NAMES = {"chat.tools_json": "tools", "chat.template_json": "chat_template_kwargs"}
"""What a body calls what the template reads beside messages."""


def chat_completions(raw: bytes | bytearray, label: str) -> Asked:
    """label: from the header x-request-id. InvalidArgument or Unimplemented names the field."""
    body = parse(ChatCompletions, raw)
    refuse(body, HARMLESS, REFUSED)
    both = common(body, label)
    request = RawRequest(
        **both.fields,
        chat=messages_of(body.messages),
        tools=_tools(body),
        template_variables=variables_of(body),
        logprobs=_logprobs(body),
    )
    says_usage, counts = options(body)
    names = {**both.names, "logprobs": "top_logprobs", **TEMPLATE_NAMES}
    return Asked(CHAT, (request,), names, bool(body.stream), says_usage, counts)


def variables_of(body: ChatCompletions | Tokenize) -> dict[str, Any] | None:
    """Further variables of the template."""
    variables = dict(body.chat_template_kwargs or {})
    if body.add_generation_prompt is not None:
        variables["add_generation_prompt"] = body.add_generation_prompt
    return variables or None


def _logprobs(body: ChatCompletions) -> int | None:
    """How many of the likeliest to report; None for no log-probabilities at all."""
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise wrong("top_logprobs", "is only for logprobs: true")
    return None


def _tools(body: ChatCompletions) -> Sequence[Any] | None:
    """For the template; none where none may be called."""
    choice = body.tool_choice
    if choice is None or choice == "auto":
        return body.tools or None
    if choice == "none":
        return None
    shown = choice if isinstance(choice, str) else "a named function"
    raise Unimplemented(f"tool_choice: {shown[:40]!r} is not supported, only auto and none", field="tool_choice")
