"""Reads the prompt of `generate` (an argument, stdin, or a file of token ids) and other texts. Knows no model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kvrelay.errors import InvalidArgument

if TYPE_CHECKING:
    from kvrelay.client import Prompt


def read_prompt(argument: str | None, tokens_file: str, chat: bool) -> Prompt:
    """Exactly one of the two must be given ("-" is stdin in both). InvalidArgument names what cannot be read."""
    if tokens_file:
        return parse_token_ids(_text(_read(tokens_file, "tokens"), "tokens"))
    assert argument is not None
    text = _text(_read("-", "prompt"), "prompt") if argument == "-" else _checked(argument)
    return [{"role": "user", "content": text}] if chat else text


def read_file_text(path: str, field: str = "prompt") -> str:
    """A file's text, of stdin for "-". InvalidArgument of the field says what cannot be read."""
    return _text(_read(path, field), field)


def parse_token_ids(text: str) -> list[int]:
    """A JSON list, or numbers with white space between them."""
    try:
        ids = json.loads(text) if text.lstrip().startswith("[") else [int(word) for word in text.split()]
    except json.JSONDecodeError as error:
        raise InvalidArgument(f"tokens is not a JSON list: {error}", field="tokens") from error
    except ValueError as error:
        raise InvalidArgument("tokens must be a JSON list or numbers with spaces between", field="tokens") from error
    for at, token_id in enumerate(ids):
        if type(token_id) is not int:
            raise InvalidArgument(f"tokens[{at}] must be a whole number, not {token_id!r}", field=f"tokens[{at}]")
    return list(ids)


def _read(path: str, field: str) -> bytes:
    if path == "-":
        return sys.stdin.buffer.read()
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidArgument(f"cannot read {path}: {error.strerror or error}", field=field) from error


def _text(raw: bytes, field: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidArgument(
            f"{field} is not valid UTF-8: {error.reason} at byte {error.start}", field=field
        ) from None


def _checked(argument: str) -> str:
    """Bytes of the command line that are no UTF-8 come in as lone surrogates."""
    try:
        argument.encode("utf-8")
    except UnicodeEncodeError:
        raise InvalidArgument("prompt is not valid UTF-8", field="prompt") from None
    return argument
