"""What each token stands for in bytes, where a tokenizer's tokens are fixed bytes. Knows no streams and no requests."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer


def byte_table(tokenizer: Tokenizer, vocab_size: int) -> tuple[list[bytes] | None, bool]:
    """(token id -> bytes, whether the first space of a text is stripped); None where tokens are not fixed bytes.

    Special tokens stand for their names; ids without a token (padding of the embedding) for nothing.
    """
    decoder = json.loads(tokenizer.to_str()).get("decoder") or {}
    if decoder.get("type") == "ByteLevel":
        return _table(tokenizer, vocab_size, _byte_level_piece), False
    steps = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else []
    if [s.get("type") for s in steps[:3]] != ["Replace", "ByteFallback", "Fuse"]:
        return None, False
    strip = steps[3:]
    if steps[0].get("pattern") != {"String": "▁"} or steps[0].get("content") != " " or not _strips_one(strip):
        return None, False
    return _table(tokenizer, vocab_size, _sentencepiece_piece), bool(strip)


def _strips_one(steps: Sequence[dict[str, Any]]) -> bool:
    """No further step, or just the one that takes the space away which the normalizer puts before a text."""
    return not steps or list(steps) == [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]


def longest_token(tokenizer: Tokenizer, table: list[bytes] | None) -> int:
    """Characters of text that one token can stand for at most; 0 where nothing can be said.

    A normalizer may drop text before it is cut into tokens, and some added tokens swallow the spaces around them.
    """
    if table is None or json.loads(tokenizer.to_str()).get("normalizer") is not None:
        return 0
    added: list[AddedToken] = list(tokenizer.get_added_tokens_decoder().values())
    if any(token.lstrip or token.rstrip for token in added):
        return 0
    return max(*(len(piece) for piece in table), *(len(token.content) for token in added))


def _table(tokenizer: Tokenizer, vocab_size: int, piece_bytes: Callable[[str], bytes]) -> list[bytes]:
    table = [b""] * vocab_size
    for piece, token_id in tokenizer.get_vocab().items():
        if token_id < vocab_size:
            table[token_id] = piece_bytes(piece)
    return table


def special_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Tokens that steer a model and are no text of an answer."""
    added: dict[int, AddedToken] = tokenizer.get_added_tokens_decoder()
    return frozenset(token_id for token_id, token in added.items() if token.special)


def without(table: list[bytes], token_ids: frozenset[int]) -> list[bytes]:
    """The same table, where these stand for nothing."""
    return [b"" if i in token_ids else piece for i, piece in enumerate(table)]


def _byte_level_alphabet() -> dict[str, int]:
    """The printable stand-in of each byte in byte-level BPE, turned round: character -> byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_ALPHABET = _byte_level_alphabet()


def _byte_level_piece(piece: str) -> bytes:
    """A piece with a character outside the alphabet (an added token) stands for itself."""
    try:
        return bytes(_ALPHABET[char] for char in piece)
    except KeyError:
        return piece.encode()


def _sentencepiece_piece(piece: str) -> bytes:
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return bytes([int(piece[3:5], 16)])
    return piece.replace("▁", " ").encode()
