"""Which tokens a grammar allows next, by llguidance. Knows no logits but those it masks, no batch, no requests.

What may follow is a function of the grammar and of the output so far: matchers are a cache of that, one for each
sequence, and are made anew wherever there is none (a sequence that moved here, was forked, or waited long).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from engine.sampler import Draw, Floats, GrammarFailed
from engine.token_ids import TokenIds
from kvrelay.guidance import byte_tokenizer, file_tokenizer, limits, words_of
from kvrelay.requests import SequenceKey

MAX_MATCHERS = 1024
"""Of sequences: more than run at once. Each holds the states of its lexer, some 10 kB .. 10 MB."""
MAX_COMPILED = 32
"""Grammars that are ready to start from: copying one takes a tenth of making it, or far less."""

_SET = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_ADDED = np.where(_SET == 1, np.float32(0), np.float32(-np.inf))
"""[256, 8]: what each bit of a byte, the lowest first, adds to its logit. Bit i % 8 of byte i // 8 is token i's."""

T = TypeVar("T")
K = TypeVar("K")


@dataclass(slots=True)
class _Matching:
    """A matcher that has taken in the first `consumed` tokens of a sequence's output."""

    grammar: str
    matcher: Any
    consumed: int = 0


class Grammars:
    """Masks of one model's vocabulary. The tokenizer is read at the first grammar. Used by one thread."""

    def __init__(self, read: Callable[[], Any], vocab_size: int, eos_ids: Sequence[int]) -> None:
        """read: makes the LLTokenizer."""
        self._read = read
        self._tokenizer: Any = None
        self._vocab_size = vocab_size
        self._eos_ids = frozenset(i for i in eos_ids if 0 <= i < vocab_size)
        self._bits = np.zeros((vocab_size + 31) // 32 * 4, np.uint8)
        self._added = np.empty((len(self._bits), 8), np.float32)
        self._compiled: OrderedDict[str, Any] = OrderedDict()
        self._matchings: OrderedDict[SequenceKey, _Matching] = OrderedDict()

    @classmethod
    def of_directory(cls, directory: str | Path, vocab_size: int, eos_ids: Sequence[int]) -> Grammars:
        """Of a model with a tokenizer.json. vocab_size: of its logits; ids beyond the tokenizer's are never allowed."""
        return cls(lambda: file_tokenizer(directory, vocab_size, eos_ids), vocab_size, eos_ids)

    @classmethod
    def of_bytes(cls, vocab_size: int, eos_id: int) -> Grammars:
        """Of ids that are bytes; from 256 on they stand for no text."""
        return cls(lambda: byte_tokenizer(vocab_size, eos_id), vocab_size, [eos_id])

    def disallow(self, row: Floats, draw: Draw) -> None:
        """Set to -inf, in place, each of the logits [vocab] whose token may not follow draw.past.

        EOS ids are allowed where the text is complete, all of them, and nowhere else; after one, nothing else is.
        GrammarFailed: the grammar is in error, or the text can neither go on nor end.
        """
        bits, output = self._bits, _output(draw)
        matching = self._kept(draw, output)
        news = output.after(matching.consumed if matching is not None else 0)
        if self._eos_ids.isdisjoint(news):  # as are those that a matcher has consumed
            matcher = self._fed(matching, draw, news)
            matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
            if matcher.is_error():
                raise GrammarFailed(_failure(matcher))
            ends = matcher.is_accepting()
        else:
            bits.fill(0)
            ends = True
        for eos_id in self._eos_ids:
            at, bit = eos_id // 8, 1 << eos_id % 8
            bits[at] = int(bits[at]) | bit if ends else int(bits[at]) & ~bit
        if not bits.any():
            raise GrammarFailed("the grammar allows no token here, and no end")
        # Adding from a table takes 20 us for 49,152 tokens however many are allowed; a boolean index up to 200.
        _ADDED.take(bits, axis=0, out=self._added, mode="clip")
        row += self._added.reshape(-1)[: len(row)]

    def _kept(self, draw: Draw, output: TokenIds) -> _Matching | None:
        """One that has consumed the beginning of the output, or all of it; None if there is none."""
        matching = self._matchings.get(draw.key) if draw.key is not None else None
        if matching is None or matching.grammar != draw.sampling.grammar or matching.consumed > len(output):
            return None
        return matching

    def _fed(self, matching: _Matching | None, draw: Draw, news: list[int]) -> Any:
        """The matcher, a fresh one if there is none, once it has consumed the news."""
        grammar = draw.sampling.grammar
        if matching is None:
            matching = _Matching(grammar, self._fresh(grammar))
        matcher = matching.matcher
        if (news and not matcher.consume_tokens(news)) or matcher.is_error():
            if draw.key is not None:
                self._matchings.pop(draw.key, None)
            raise GrammarFailed(_failure(matcher))
        matching.consumed += len(news)
        if draw.key is not None:
            _keep(self._matchings, draw.key, matching, MAX_MATCHERS)
        return matcher

    def _fresh(self, grammar: str) -> Any:
        """A matcher at its start."""
        from llguidance import LLMatcher

        if self._tokenizer is None:
            self._tokenizer = self._read()
        start = self._compiled.get(grammar)
        if start is None:
            start = LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits())
        _keep(self._compiled, grammar, start, MAX_COMPILED)
        return start.deep_copy()


def _output(draw: Draw) -> TokenIds:
    """What was drawn before."""
    assert draw.past is not None, f"token {draw.index} of {draw.key} follows tokens that are not known here"
    return draw.past.output


def _failure(matcher: Any) -> str:
    return f"the grammar cannot be followed: {words_of(matcher.get_error())}"


def _keep(kept: OrderedDict[K, T], key: K, value: T, most: int) -> None:
    """As the last used; the one that was not used for longest goes."""
    kept[key] = value
    kept.move_to_end(key)
    if len(kept) > most:
        kept.popitem(last=False)
