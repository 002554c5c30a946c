"""The prompts of a body: strings, token ids, lists of either, chat messages. Names the entry that is wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from coordinator import validate
from coordinator.http.parsing import wrong
from coordinator.raw import Message
from kvrelay.errors import Unimplemented

MAX_PROMPTS = 128
"""Of one body; each is a request of its own."""
MAX_CHOICES = 1024
"""Of one body, over all its prompts."""

Prompt = str | tuple[int, ...]


def prompts_of(value: Any) -> list[Prompt]:
    """One prompt or several. A list of numbers is one prompt of token ids."""
    if isinstance(value, str):
        return [value]
    if value is None:
        raise wrong("prompt", "must be set")
    if not isinstance(value, list):
        raise wrong("prompt", "must be a string, a list of strings, token ids or a list of lists of token ids")
    if not value:
        raise wrong("prompt", "must not be empty")
    if all(type(one) is int for one in value):
        return [tuple(value)]
    if len(value) > MAX_PROMPTS:
        raise wrong("prompt", f"at most {MAX_PROMPTS} prompts, not {len(value)}")
    return [_one(at, one) for at, one in enumerate(value)]


def _one(at: int, value: Any) -> Prompt:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(type(one) is int for one in value):
        return tuple(value)
    raise wrong(f"prompt[{at}]", "must be a string or token ids, as all of the list")


def messages_of(value: Any) -> tuple[Message, ...]:
    """As templates read them: content is one string, arguments of tool calls are objects."""
    if value is None:
        raise wrong("messages", "must be set")
    if not isinstance(value, list):
        raise wrong("messages", "must be a list of messages")
    arguments = [len(one) for one in _arguments_of(value)]
    validate.check_json(sum(arguments), len(arguments), "messages")
    return tuple(_message(f"messages[{at}]", message) for at, message in enumerate(value))


def _arguments_of(messages: list[Any]) -> Iterator[str]:
    """JSON in strings, wherever there is any: parsing too much of it would hold every stream."""
    for message in messages:
        calls = message.get("tool_calls") if isinstance(message, dict) else None
        for call in calls if isinstance(calls, list) else ():
            function = call.get("function") if isinstance(call, dict) else None
            arguments = function.get("arguments") if isinstance(function, dict) else None
            if isinstance(arguments, str):
                yield arguments


def _message(at: str, message: Any) -> Message:
    if not isinstance(message, dict):
        raise wrong(at, "must be an object with role and content")
    if not isinstance(message.get("role"), str):
        raise wrong(f"{at}.role", "must be a string")
    read = {**message, "content": _content(f"{at}.content", message.get("content"))}
    calls = message.get("tool_calls")
    if calls is not None:
        read["tool_calls"] = _tool_calls(f"{at}.tool_calls", calls)
    return read


def _content(at: str, content: Any) -> str:
    """A string; none is an empty one, as of an assistant that only called tools. Parts are joined by line ends."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong(at, "must be a string or a list of parts")
    return "\n".join(_part(f"{at}[{number}]", part) for number, part in enumerate(content))


def _part(at: str, part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise wrong(at, "must be an object with a type")
    if kind != "text":
        raise Unimplemented(f"{at}.type: {kind[:40]!r} is not supported, only text", field=f"{at}.type")
    if not isinstance(part.get("text"), str):
        raise wrong(f"{at}.text", "must be a string")
    text: str = part["text"]
    return text


def _tool_calls(at: str, calls: Any) -> Sequence[Any]:
    """Arguments come as JSON in a string; templates print them as JSON again."""
    if not isinstance(calls, list):
        raise wrong(at, "must be a list")
    return [_tool_call(f"{at}[{number}]", call) for number, call in enumerate(calls)]


def _tool_call(at: str, call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise wrong(f"{at}.function", "must be an object")
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        parsed = json.loads(arguments or "{}")
    except (ValueError, RecursionError) as error:
        raise wrong(f"{at}.function.arguments", f"is not JSON: {error}") from None
    return {**call, "function": {**function, "arguments": parsed}}
