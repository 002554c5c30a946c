"""How tokens that were there before change a row of logits. Knows no sampling beyond that."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from engine.plan import Past
from kvrelay.requests import Sampling

_GREATEST = float(np.finfo(np.float32).max)


def penalize(row: npt.NDArray[np.float32], sampling: Sampling, past: Past) -> None:
    """Logits [vocab], in place: repetition of anything known, then presence and frequency of what is output.

    No finite logit becomes +inf or NaN, however small the penalty.
    """
    known = np.array(past.token_ids, dtype=np.int64)
    if sampling.repetition_penalty != 1.0:
        seen = np.flatnonzero(np.bincount(known))
        logits = row[seen].astype(np.float64)
        with np.errstate(over="ignore"):
            divided, multiplied = logits / sampling.repetition_penalty, logits * sampling.repetition_penalty
            row[seen] = np.minimum(np.where(logits > 0.0, divided, multiplied), _GREATEST)
    if sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0:
        times = np.bincount(known[past.num_prompt_tokens :])  # by token id
        said = np.flatnonzero(times)
        row[said] -= sampling.presence_penalty + sampling.frequency_penalty * times[said]
