"""The next token of a row of logits. A pure function of (logits, sampling, seed, index): no state, no batch.

Given the same logits, token `index` of a request is the same in any batch, on any worker, after any restart:
one uniform per token comes from a hash of (seed, index), and each row is computed on its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvrelay.errors import Internal
from kvrelay.requests import Sampling

GREEDY_BELOW = 1e-5
"""Below this temperature a sampled row could only overflow or be greedy, so it is greedy."""
_CHUNK = 256
_FIRST_GUESS = 256

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]


def sample(logits: torch.Tensor, draws: Sequence[tuple[Sampling, int]]) -> tuple[int, ...]:
    """One token id per row of float32 logits [num_samples, vocab]; draws holds (sampling, output index) of each row.

    Internal if a row's greatest logit is not finite: such a model must not go on serving.
    """
    if not draws:
        return ()
    rows: Floats = logits.cpu().numpy()
    best = rows.argmax(axis=1)  # the lowest id on ties, a NaN before all else
    if not np.isfinite(rows[np.arange(len(rows)), best]).all():
        raise Internal("logits are not finite")
    token_ids: list[int] = best.tolist()
    weights = np.empty_like(rows[0])  # one for all rows: a fresh one costs a page fault every 4 KiB
    for i, (sampling, index) in enumerate(draws):
        if sampling.temperature >= GREEDY_BELOW:
            with np.errstate(over="ignore"):  # to -inf, whose weight is 0
                np.subtract(rows[i], rows[i, best[i]], out=weights)
                weights *= np.float32(1.0 / sampling.temperature)
                np.exp(weights, out=weights)
            token_ids[i] = _draw(rows[i], weights, sampling, index)
    return tuple(token_ids)


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
    ids = _top_k_ids(row, top_k) if top_k else np.arange(len(weights))
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
