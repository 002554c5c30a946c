"""Token ids -> text, a piece at a time: the joined pieces are the full decode. Knows no tokenizer library and no stops.

Where a token is a fixed string of bytes (byte-level BPE, SentencePiece with byte fallback, plain bytes) an incremental
UTF-8 decoder does it, with U+FFFD for what is no UTF-8. For all others a window of tokens is decoded again and again.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

REPLACEMENT = "�"
LONGEST_HOLD = 8
"""Tokens that the window may hold back waiting for a character to become whole."""


class Detokenizer(Protocol):
    """One stream's decoder. `push` raises only for ids outside the vocabulary (IndexError)."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class ByteDetokenizer:
    """Over a table token id -> bytes (empty for special tokens). Strips one leading space where the model adds one."""

    __slots__ = ("_at_start", "_decode", "_decoder", "_strip_first_space", "_table")

    def __init__(self, table: Sequence[bytes], strip_first_space: bool = False) -> None:
        self._table = table
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decode = self._decoder.decode
        self._strip_first_space = strip_first_space
        self._at_start = True

    def push(self, token_id: int) -> str:
        if token_id < 0:
            raise IndexError(token_id)
        return self._out(self._decode(self._table[token_id]))

    def flush(self) -> str:
        return self._out(self._decode(b"", True))

    def _out(self, text: str) -> str:
        if self._at_start and text:
            self._at_start = False
            if self._strip_first_space and text[0] == " ":
                return text[1:]
        return text


class WindowDetokenizer:
    """Decodes the tokens since the last certain text together with those just before it, and gives the difference."""

    __slots__ = ("_decode", "_ids", "_prefix", "_read", "_vocab_size")

    def __init__(self, decode: Callable[[Sequence[int]], str], vocab_size: int) -> None:
        self._decode = decode
        self._vocab_size = vocab_size
        self._ids: list[int] = []
        self._prefix = 0
        self._read = 0

    def push(self, token_id: int) -> str:
        if not 0 <= token_id < self._vocab_size:
            raise IndexError(token_id)
        self._ids.append(token_id)
        return self._difference(final=False)

    def flush(self) -> str:
        return self._difference(final=True)

    def _difference(self, final: bool) -> str:
        before = self._decode(self._ids[self._prefix : self._read])
        text = self._decode(self._ids[self._prefix :])
        unsure = text.endswith(REPLACEMENT) and len(self._ids) - self._read < LONGEST_HOLD
        if len(text) <= len(before) or (unsure and not final):
            return ""
        self._prefix, self._read = self._read, len(self._ids)
        return text[len(before) :]
