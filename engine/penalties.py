"""How tokens that were there before change a row of logits. Knows no sampling beyond that."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from engine.plan import Past
from engine.token_ids import CODE, TokenIds
from kvrelay.requests import Sampling

_GREATEST = float(np.finfo(np.float32).max)


def penalize(row: npt.NDArray[np.float32], sampling: Sampling, past: Past) -> None:
    """Logits [vocab], in place: repetition of anything known, then presence and frequency of what is output.

    No finite logit becomes +inf or NaN, however small the penalty.
    """
    output = _ids(past.output)
    if sampling.repetition_penalty != 1.0:
        known = np.zeros(len(row), np.bool_)
        known[_ids(past.prompt)] = known[output] = True
        seen = np.flatnonzero(known)
        logits = row[seen].astype(np.float64)
        with np.errstate(over="ignore"):
            divided, multiplied = logits / sampling.repetition_penalty, logits * sampling.repetition_penalty
            row[seen] = np.minimum(np.where(logits > 0.0, divided, multiplied), _GREATEST)
    if sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0:
        times = np.bincount(output)  # by token id
        said = np.flatnonzero(times)
        row[said] -= sampling.presence_penalty + sampling.frequency_penalty * times[said]


def _ids(token_ids: TokenIds) -> npt.NDArray[np.uint32]:
    return np.frombuffer(token_ids.packed, np.dtype(CODE))
