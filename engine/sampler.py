"""The next token of a row of logits. A pure function of (logits, sampling, index, past): no state, no batch.

Given the same logits, token `index` of a request is the same in any batch, on any worker, after any restart:
one uniform per token comes from a hash of (seed, index), and each row is computed on its own.

A row goes through: log-probabilities of the logits as they came; penalties; biases; what the grammar does not allow
and what is banned, to -inf; temperature, min_p, top_k, top_p; the draw. Knows neither torch nor llguidance.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from engine.likelihood import logprobs_of
from engine.penalties import penalize
from engine.plan import Past, SequenceSlice
from kvrelay.errors import Internal
from kvrelay.requests import Logprobs, Sampling, SequenceKey

GREEDY_BELOW = 1e-5
"""Below this temperature a sampled row could only overflow or be greedy, so it is greedy."""
_COLDEST = float(np.finfo(np.float32).tiny)
"""Least inverse temperature: with 0, what is masked would be -inf * 0."""
_CHUNK = 256
_FIRST_GUESS = 256

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]


class Draw(NamedTuple):
    """One token to be drawn. key: whose it is, so that what is kept of a sequence's grammar can be found again."""

    sampling: Sampling
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs here
    past: Past | None = None
    key: SequenceKey | None = None

    @property
    def plain(self) -> bool:
        """Whether the logits are used as they are and nothing but the token is wanted."""
        return self.past is None and self.sampling.plain


class Drawn(NamedTuple):
    """One token for each draw. logprobs and failures are those of engine.plan.Result."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Logprobs | None, ...] = ()
    failures: tuple[tuple[int, str], ...] = ()


class GrammarFailed(Exception):
    """This draw cannot be made: its grammar is in error, or allows no token. The message is for the client."""


class Masks(Protocol):
    """What grammars allow."""

    def disallow(self, row: Floats, draw: Draw) -> None:
        """Set to -inf, in place, each of the logits [vocab] whose token may not follow draw.past.

        GrammarFailed: that cannot be said.
        """


def draws_of(slices: Iterable[SequenceSlice]) -> list[Draw]:
    """The draws of a plan, in the order of Result: sequence 0 of each slice that samples, then its forks."""
    draws: list[Draw] = []
    for rows in slices:
        if rows.samples:
            draws.append(Draw(rows.sampling, rows.index, rows.past, rows.key))
            for number, sampling in enumerate(rows.forks, 1):
                draws.append(Draw(sampling, rows.index, rows.past, replace(rows.key, sequence=number)))
    return draws


def sample(rows: Floats, draws: Sequence[Draw], grammars: Masks | None = None) -> Drawn:
    """One token id per row of logits [num_samples, vocab], which are left as they are.

    A draw that cannot be made is among `failures` and harms no other. Internal if a row's greatest logit is not
    finite: such a model must not go on serving.
    """
    if not draws:
        return Drawn()
    best = rows.argmax(axis=1)  # the lowest id on ties, a NaN before all else
    if not np.isfinite(rows[np.arange(len(rows)), best]).all():
        raise Internal("logits are not finite")
    token_ids: list[int] = best.tolist()
    weights = np.empty_like(rows[0])  # one for all rows: a fresh one costs a page fault every 4 KiB
    logprobs: dict[int, Logprobs] = {}
    failures: list[tuple[int, str]] = []
    for i, draw in enumerate(draws):
        if draw.plain:
            token_ids[i] = _token(rows[i], token_ids[i], weights, draw)
            continue
        try:
            row = _altered(rows[i], draw, grammars)
        except GrammarFailed as failed:
            failures.append((i, str(failed)))
            continue
        token_ids[i] = _token(row, int(row.argmax()), weights, draw)
        if draw.sampling.logprobs is not None:
            logprobs[i] = logprobs_of(rows[i], token_ids[i], draw.sampling.logprobs)
    told = tuple([logprobs.get(i) for i in range(len(draws))]) if logprobs else ()
    return Drawn(tuple(token_ids), told, tuple(failures))


def _altered(row: Floats, draw: Draw, grammars: Masks | None) -> Floats:
    """A copy with penalties, biases and masks, at least one token of which is possible; the row if it has none."""
    sampling = draw.sampling
    if draw.past is None and not sampling.logit_bias:
        assert not sampling.looks_back, f"token {draw.index} of {draw.key} depends on tokens that are not known here"
        return row
    row = row.copy()
    if sampling.penalizes:
        assert draw.past is not None
        penalize(row, sampling, draw.past)
    if sampling.logit_bias:
        ids, added = zip(*sampling.logit_bias, strict=True)
        np.add.at(row, np.array(ids), np.array(added, np.float32))
    if sampling.grammar:
        if grammars is None:
            raise GrammarFailed("this engine reads no grammars")
        grammars.disallow(row, draw)
    if not np.isfinite(row.max()):
        raise GrammarFailed(f"the grammar allows no token at output index {draw.index}")
    if draw.past is not None and draw.past.banned:
        _ban(row, draw.past.banned)
    return row


def _ban(row: Floats, token_ids: frozenset[int]) -> None:
    """Unless nothing else is possible."""
    ids = np.array([token_id for token_id in token_ids if token_id < len(row)], np.int64)
    before = row[ids]
    row[ids] = -np.inf
    if np.isneginf(row.max()):
        row[ids] = before


def _token(row: Floats, best: int, weights: Floats, draw: Draw) -> int:
    """weights: room for [vocab]."""
    sampling = draw.sampling
    if sampling.temperature < GREEDY_BELOW:
        return best
    with np.errstate(over="ignore"):  # to -inf, whose weight is 0
        np.subtract(row, row[best], out=weights)
        weights *= np.float32(max(1.0 / sampling.temperature, _COLDEST))
        np.exp(weights, out=weights)
    if sampling.min_p > 0.0:  # the likeliest weighs 1
        weights[weights < np.float32(sampling.min_p)] = 0.0
    return _draw(row, weights, sampling, draw.index)


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1), 53 bits of BLAKE2b over the seed's low 64 bits and the output index."""
    key = (seed % 2**64).to_bytes(8, "little") + index.to_bytes(8, "little")
    digest = hashlib.blake2b(key, digest_size=8, person=b"kvrelay-sample").digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def _draw(row: Floats, weights: Floats, sampling: Sampling, index: int) -> int:
    """Of weights exp((row - max) / temperature): top_k, top_p of what top_k left, inverse CDF at the uniform."""
    u = uniform(sampling.seed, index)
    top_k = sampling.top_k if 0 < sampling.top_k < len(weights) else 0
    if not top_k and sampling.top_p >= 1.0:
        return _invert(weights, u)
    if top_k:
        ids = _top_k_ids(row, top_k)
    else:  # where most tokens are ruled out, only the others need sorting
        ids = np.flatnonzero(weights) if sampling.grammar or sampling.min_p else np.arange(len(weights))
    if sampling.top_p < 1.0:
        ids = _top_p_ids(weights, ids, sampling.top_p)
    return int(ids[_invert_small(weights[ids], u)])


def _top_k_ids(row: Floats, k: int) -> Ids:
    """Ids, ascending, of the k greatest logits; all that tie with the k-th are kept, so order never matters."""
    kth = np.partition(row, len(row) - k)[len(row) - k]
    return np.flatnonzero(row >= kth)


def _top_p_ids(weights: Floats, ids: Ids, top_p: float) -> Ids:
    """The shortest list of most likely tokens whose share reaches top_p, most likely first, low ids first on ties.

    Only as many of the greatest as are needed get sorted, not the vocabulary.
    """
    kept = weights[ids]
    target = top_p * float(kept.sum(dtype=np.float64))
    count = _FIRST_GUESS
    while count < len(ids):
        greatest = kept >= np.partition(kept, len(ids) - count)[len(ids) - count]
        if float(kept[greatest].sum(dtype=np.float64)) >= target:
            ids = ids[greatest]
            break
        count *= 8
    ids = ids[np.argsort(-weights[ids], kind="stable")]
    shares = np.cumsum(weights[ids], dtype=np.float64)
    return ids[: int(np.searchsorted(shares, target)) + 1]


def _invert_small(weights: Floats, u: float) -> int:
    """The first position whose cumulated weight exceeds u of the total; never one of weight 0."""
    cumulated = np.cumsum(weights, dtype=np.float64)
    position = int(np.searchsorted(cumulated, u * cumulated[-1], side="right"))
    # u * total may round up to the total: then the last position that weighs anything.
    return position if position < len(weights) else int(np.flatnonzero(weights)[-1])


def _invert(weights: Floats, u: float) -> int:
    """Like _invert_small for a whole vocabulary, by chunks: sums first, then a scan of one chunk only."""
    count = len(weights) // _CHUNK
    sums = weights[: count * _CHUNK].reshape(count, _CHUNK).sum(axis=1)
    sums = np.append(sums, weights[count * _CHUNK :].sum())
    ends = np.cumsum(sums, dtype=np.float64)
    target = u * float(ends[-1])
    chunk = int(np.searchsorted(ends, target, side="right"))
    if chunk == len(ends):
        return int(np.flatnonzero(weights)[-1])
    start = chunk * _CHUNK
    piece = np.cumsum(weights[start : start + _CHUNK], dtype=np.float64)
    inside = int(np.searchsorted(piece, target - (float(ends[chunk - 1]) if chunk else 0.0), side="right"))
    # The chunk's float32 sum may round above its own scan: then its last position that weighs anything.
    return start + (inside if inside < len(piece) else int(np.flatnonzero(weights[start : start + _CHUNK])[-1]))
