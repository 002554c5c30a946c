"""Log-probabilities of a row of logits, to be reported beside a token. Takes no part in drawing it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvrelay.requests import Logprobs


def logprobs_of(row: npt.NDArray[np.float32], token_id: int, count: int) -> Logprobs:
    """Of logits [vocab] with at least one finite and none above: those of a token and of the `count` likeliest.

    Log softmax to 1e-6: weights are float32, a third of the time of float64, their sum and all after it are float64.
    Likeliest first, low ids first on ties; tokens that are impossible are never among them.
    """
    greatest = row.max()
    with np.errstate(over="ignore"):  # to -inf, which weighs nothing
        total = np.exp(row - greatest).sum(dtype=np.float64)
    norm = float(greatest) + float(np.log(total))
    ids = _likeliest(row, count)
    return Logprobs(float(row[token_id]) - norm, tuple([(i, float(row[i]) - norm) for i in ids]))


def _likeliest(row: npt.NDArray[np.float32], count: int) -> list[int]:
    if count < 1:
        return []
    ids = np.flatnonzero(row >= np.partition(row, -count)[-count]) if count < len(row) else np.arange(len(row))
    ids = ids[np.argsort(-row[ids], kind="stable")][:count]
    return [i for i in ids.tolist() if row[i] > -np.inf]
