"""Which tokens a grammar allows next, by llguidance. Knows no logits but those it masks, no batch, no requests.

What may follow is a function of the grammar and of the output so far: matchers are a cache of that, one for each
sequence, and are made anew wherever there is none (a sequence that moved here, was forked, or waited long).
"""

from __future__ import annotations

import time
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

MAX_MATCHERS = 256
"""Of sequences: as many as run at once (engine/budgets.py). Each holds the states of its lexer, some 10 kB .. 10 MB."""
MAX_COMPILED = 32
"""Grammars that are ready to start from: copying one takes a tenth of making it, or far less."""
USUAL_S = 0.02
"""Of processor time, for one mask: most take below 1 ms, the dearest that are of use 5 ms."""
MAX_EXTRA_S = 0.5
"""Of what the masks of a sequence take beyond that. All streams of a worker stand meanwhile."""

_SET = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_ADDED = np.where(_SET == 1, np.float32(0), np.float32(-np.inf))
"""[256, 8]: what each bit of a byte, the lowest first, adds to its logit. Bit i % 8 of byte i // 8 is token i's."""

T = TypeVar("T")
K = TypeVar("K")


@dataclass(slots=True)
class _Matching:
    """A matcher that has taken in the first `consumed` tokens of a sequence's output.

    extra_s: of processor time, what that and its masks took beyond what is usual.
    """

    grammar: str
    matcher: Any
    consumed: int = 0
    extra_s: float = 0.0


class Grammars:
    """Masks of one model's vocabulary. The tokenizer is read at the first grammar. Used by one thread."""

    def __init__(
        self,
        read: Callable[[], Any],
        vocab_size: int,
        eos_ids: Sequence[int],
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """read: makes the LLTokenizer. clock: seconds of processor time, so that a busy machine fails no grammar."""
        self._read = read
        self._clock = clock
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
        GrammarFailed: the grammar is in error, takes too long, or the text can neither go on nor end.
        """
        output = _output(draw)
        matching = self._take(draw, len(output))
        if self._eos_ids.isdisjoint(output.after(matching.consumed)):  # no matcher consumes one of them
            ends = self._mask(matching, output)
        else:
            self._bits.fill(0)
            ends = True
        for eos_id in self._eos_ids:
            self._bits[eos_id // 8] &= ~(1 << eos_id % 8) & 0xFF
        if self._bits.any():
            if draw.key is not None:
                _keep(self._matchings, draw.key, matching, MAX_MATCHERS)
        elif not ends:
            raise GrammarFailed("the grammar allows no token here, and no end")
        if ends:
            for eos_id in self._eos_ids:
                self._bits[eos_id // 8] |= 1 << eos_id % 8
        # Adding from a table takes 20 us for 49,152 tokens however many are allowed; a boolean index up to 200.
        _ADDED.take(self._bits, axis=0, out=self._added, mode="clip")
        row += self._added.reshape(-1)[: len(row)]

    def _take(self, draw: Draw, length: int) -> _Matching:
        """What is kept of the sequence, or a new one. length: of its output. Put back only while the text goes on."""
        matching = self._matchings.pop(draw.key, None) if draw.key is not None else None
        if matching is None or matching.grammar != draw.sampling.grammar or matching.consumed > length:
            matching = _Matching(draw.sampling.grammar, self._fresh(draw.sampling.grammar))
        return matching

    def _mask(self, matching: _Matching, output: TokenIds) -> bool:
        """Fills the bits with what may follow the output; whether the text is complete there."""
        matcher, news = matching.matcher, output.after(matching.consumed)
        began = self._clock()
        taken = not news or matcher.consume_tokens(news)
        if taken and not matcher.is_error():
            matcher.unsafe_compute_mask_ptr(self._bits.ctypes.data, self._bits.nbytes)
        if not taken or matcher.is_error():
            raise GrammarFailed(f"the grammar cannot be followed: {words_of(matcher.get_error())}")
        matching.extra_s += max(0.0, self._clock() - began - USUAL_S * (1 + len(news)))
        if matching.extra_s > MAX_EXTRA_S:
            raise GrammarFailed("the grammar cannot be followed: it takes too much processor time")
        matching.consumed = len(output)
        return bool(matcher.is_accepting())

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


def _keep(kept: OrderedDict[K, T], key: K, value: T, most: int) -> None:
    """As the last used; the one that was not used for longest goes."""
    kept[key] = value
    kept.move_to_end(key)
    if len(kept) > most:
        kept.popitem(last=False)
