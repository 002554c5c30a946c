"""How llguidance is set up, alike where a grammar is tried and where it masks logits. Knows no requests and no arrays.

One version, one set of limits and one reading of a tokenizer on both sides: what a coordinator found good, a worker
can use. llguidance is imported at the first call, as most processes never see a grammar.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvrelay.errors import InvalidArgument, NotFound

MAX_LEXER_STATES = 50_000
"""Of one sequence: 1 .. 2 kB each. llguidance's own 250,000 would let one request take half a GB of a worker."""
MAX_STEP_ITEMS = 10_000
"""Of the parser, for one token. An object of 100 optional properties needs some 7,000; llguidance's own 50,000 let an
ambiguous grammar compute for seconds at each token."""
MAX_WORDS = 300


def limits() -> Any:
    """An LLParserLimits. The rest are llguidance's own: 2,000 items in a row, 200,000 units of fuel for a token.

    Large regexes are not walked ahead over the whole vocabulary: it takes long, and fails where walking as it comes
    does not.
    """
    from llguidance import LLParserLimits

    return LLParserLimits(
        step_max_items=MAX_STEP_ITEMS,
        max_lexer_states=MAX_LEXER_STATES,
        precompute_large_lexemes=False,
        verbose_errors=False,
    )


def byte_tokenizer(vocab_size: int, eos_id: int) -> Any:
    """An LLTokenizer of ids that are bytes; all ids from 256 on are special: no grammar of text allows them."""
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(_Bytes(vocab_size, eos_id)), eos_token=[eos_id])


def file_tokenizer(directory: str | Path, vocab_size: int, eos_ids: Sequence[int]) -> Any:
    """An LLTokenizer of a model's tokenizer.json. Takes a second for a vocabulary of 128,000.

    NotFound or InvalidArgument (field model) when it cannot be read.
    """
    from llguidance import LLTokenizer

    path = Path(directory) / "tokenizer.json"
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise NotFound(f"{path}: {error.strerror}", field="model") from error
    try:
        return LLTokenizer(text, n_vocab=vocab_size, eos_token=list(eos_ids) or None)
    except ValueError as error:
        raise InvalidArgument(f"{path}: llguidance cannot read it: {error}", field="model") from error


def words_of(error: str) -> str:
    """llguidance's words, in one line of bounded length."""
    words = " ".join(error.replace("<non-verbose/>", "").split())
    return words if len(words) <= MAX_WORDS else words[: MAX_WORDS - 3] + "..."


class _Bytes:
    """What TokenizerWrapper asks of a tokenizer."""

    def __init__(self, vocab_size: int, eos_id: int) -> None:
        self.eos_token_id = eos_id
        self.bos_token_id = None
        self.tokens = [bytes([i]) if i < 256 else b"<%d>" % i for i in range(vocab_size)]
        self.special_token_ids = list(range(256, vocab_size))

    def __call__(self, text: bytes) -> list[int]:
        return list(text)
