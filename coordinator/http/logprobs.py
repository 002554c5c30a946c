"""Log-probabilities as OpenAI's two protocols write them. Knows no streams.

A token whose bytes are no text by themselves is written as bytes:\\xe2\\x80, as OpenAI's first API did.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from coordinator.stream import TokenItem
from coordinator.text import TextCodec
from kvrelay.requests import Logprobs

LEAST = -9999.0
"""Stands for the logarithm of 0, which JSON has no word for."""
Parts = Mapping[str, str]
"""JSON of what each list of an entry holds."""

compact = json.JSONEncoder(separators=(",", ":")).encode


def token_text(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def parts_of(entry: Mapping[str, Any]) -> Parts:
    """Written at once: a whole answer can have a hundred thousand of them, which together would hold every stream."""
    return {key: compact(value)[1:-1] for key, value in entry.items() if isinstance(value, list)}


def _joined(parts: Sequence[Parts], keys: Sequence[str]) -> str:
    return ",".join(f'"{key}":[{",".join([one[key] for one in parts])}]' for key in keys)


def finite(logprob: float) -> float:
    return logprob if logprob > LEAST else LEAST


class ChatLogprobs:
    """Of one request. `entry` is the object `logprobs` of a chunk; `join` that of several tokens, as JSON."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec

    def entry(self, item: TokenItem) -> dict[str, Any] | None:
        logprobs = item.logprobs
        if logprobs is None:
            return None
        top = [self._token(token_id, logprob) for token_id, logprob in logprobs.top]
        return {"content": [{**self._token(item.token_id, logprobs.token), "top_logprobs": top}], "refusal": None}

    @staticmethod
    def join(parts: Sequence[Parts]) -> str:
        return f'{{{_joined(parts, ("content",))},"refusal":null}}'

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self._codec.token_bytes(token_id)
        return {"token": token_text(raw), "logprob": finite(logprob), "bytes": list(raw)}


class CompletionLogprobs:
    """As ChatLogprobs. The token that was drawn is always among the likeliest ones, even as one more of them.

    text_offset: characters of the text before the token; a token that is not text by itself begins where it does.
    """

    def __init__(self, codec: TextCodec, skip_special_tokens: bool) -> None:
        self._codec = codec
        self._skip = skip_special_tokens
        self._offsets: dict[int, _Offset] = {}

    def entry(self, item: TokenItem) -> dict[str, Any] | None:
        logprobs = item.logprobs
        if logprobs is None:
            return None
        raw = self._codec.token_bytes(item.token_id)
        return {
            "tokens": [token_text(raw)],
            "token_logprobs": [finite(logprobs.token)],
            "top_logprobs": [self._top(item.token_id, logprobs)],
            "text_offset": [self._offset(item, raw)],
        }

    @staticmethod
    def join(parts: Sequence[Parts]) -> str:
        return f"{{{_joined(parts, tuple(parts[0]))}}}" if parts else "{}"

    def _top(self, token_id: int, logprobs: Logprobs) -> dict[str, float]:
        top = {token_text(self._codec.token_bytes(t)): finite(logprob) for t, logprob in logprobs.top}
        top.setdefault(token_text(self._codec.token_bytes(token_id)), finite(logprobs.token))
        return top

    def _offset(self, item: TokenItem, raw: bytes) -> int:
        offset = self._offsets.get(item.sequence)
        if offset is None:
            offset = self._offsets[item.sequence] = _Offset()
        silent = self._skip and not self._codec.decode([item.token_id])
        return offset.before(b"" if silent else raw)


class _Offset:
    """Counts the characters of one sequence."""

    def __init__(self) -> None:
        self._decode: Callable[[bytes], str] = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._characters = 0

    def before(self, raw: bytes) -> int:
        """How many there are before these bytes, which then count too."""
        characters = self._characters
        self._characters += len(self._decode(raw))
        return characters


LogprobsOf = ChatLogprobs | CompletionLogprobs
