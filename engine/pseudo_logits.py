"""Logits for a model that has none, so that whatever reshapes logits can be tried on it. Knows no KV and no script."""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np

from engine.plan import SequenceSlice
from engine.sampler import Drawn, Floats, Masks, draws_of, sample

SPREAD = 8.0


def draw(
    rows: SequenceSlice, digest: bytes, vocab_size: int, favourite: int, lead: float, grammars: Masks | None
) -> Drawn:
    """The tokens of a slice that samples, from logits that its digest stands for."""
    draws = draws_of([rows])
    logits = pseudo_logits(digest, vocab_size, favourite, lead)
    return sample(np.tile(logits, (len(draws), 1)), draws, grammars)


def pseudo_logits(digest: bytes, vocab_size: int, favourite: int, lead: float) -> Floats:
    """[vocab_size], all distinct, evenly spread over -SPREAD .. SPREAD in an order that the digest says.

    Only the favourite's lies above them, by `lead`.
    """
    raw = np.frombuffer(hashlib.shake_128(digest).digest(8 * vocab_size), "<u8")
    logits = np.empty(vocab_size, np.float32)
    logits[np.argsort(raw, kind="stable")] = _steps(vocab_size)
    logits[favourite] = SPREAD + lead
    return logits


@lru_cache(maxsize=1)
def _steps(vocab_size: int) -> Floats:
    return np.linspace(-SPREAD, SPREAD, vocab_size, dtype=np.float32)
