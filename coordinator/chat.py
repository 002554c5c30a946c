"""Chat templates in a sandbox. Knows no tokenizer: turns messages into the text that a model was trained on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from coordinator.field_checks import check_unicode
from kvrelay.errors import InvalidArgument

LONGEST_REASON = 300
"""Characters of what a template says of messages that it refuses."""


class ChatTemplate:
    """One model's template; `render` raises InvalidArgument(field="chat") with the template's own words."""

    def __init__(self, source: str, tokens: dict[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.globals["raise_exception"] = _raise
        environment.filters["tojson"] = _tojson
        self._tokens = tokens
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise InvalidArgument(f"the model's chat template is broken: {error}", field="model") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """messages: each with role and content. The text ends where the assistant is to go on.

        variables: more of what the template may read; they win over its own defaults.
        """
        known = {"messages": messages, "add_generation_prompt": True, "tools": tools, **self._tokens}
        try:
            text = self._template.render({**known, **(variables or {})})
        except Exception as error:  # a template may fail in any way on messages that it does not like
            reason = str(error)[:LONGEST_REASON]
            raise InvalidArgument(f"chat: the template refused the messages: {reason}", field="chat") from error
        check_unicode("chat", text)
        return text


def extent(value: object, enough: int) -> int:
    """About how many characters a nested value is written in; counts no further than to `enough`."""
    total, waiting = 0, [value]
    while waiting and total < enough:
        one = waiting.pop()
        total += len(one) if isinstance(one, str) else 1
        if isinstance(one, Mapping):
            waiting.extend(one.keys())
            waiting.extend(one.values())
        elif isinstance(one, Sequence) and not isinstance(one, str):
            waiting.extend(one)
    return total


def load_template(directory: Path) -> ChatTemplate | None:
    """From chat_template.jinja, else from tokenizer_config.json (`default` of several); None without one."""
    config = directory / "tokenizer_config.json"
    settings: dict[str, Any] = {}
    if config.is_file():
        try:
            settings = json.loads(config.read_text(encoding="utf-8"))
        except ValueError as error:
            raise InvalidArgument(f"{config}: not JSON: {error}", field="model") from error
    file = directory / "chat_template.jinja"
    source = file.read_text(encoding="utf-8") if file.is_file() else _default(settings.get("chat_template"))
    if source is None:
        return None
    tokens = {name: _content(settings.get(name)) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
    return ChatTemplate(source, tokens)


def _default(templates: Any) -> str | None:
    if isinstance(templates, list):
        named = {t["name"]: t["template"] for t in templates}
        return named.get("default")
    return templates if isinstance(templates, str) else None


def _content(token: Any) -> str:
    """A special token is a string or an object with `content`."""
    if isinstance(token, dict):
        return str(token.get("content", ""))
    return token if isinstance(token, str) else ""


def _raise(message: str) -> None:
    raise TemplateError(message)


def _tojson(value: Any, indent: int | None = None) -> str:
    """Without HTML escapes, as models were trained on."""
    return json.dumps(value, ensure_ascii=False, indent=indent)
