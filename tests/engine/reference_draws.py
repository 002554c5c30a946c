"""What a draw must come to, in plain arithmetic, and the rows of logits that engines under test drew from."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np
import pytest

from engine import pseudo_logits, sampler, torch_executor
from engine.sampler import Draw, Drawn, Floats, Masks
from kvrelay.requests import Logprobs, Sampling, SequenceKey


def reshaped(
    row: Floats, sampling: Sampling, prompt: Sequence[int], output: Sequence[int], banned: Collection[int] = ()
) -> list[float]:
    """Logits after penalties, biases and bans, each rounded to float32 as it is applied."""
    logits = [float(x) for x in row]
    for token in {*prompt, *output} if sampling.repetition_penalty != 1.0 else ():
        by = sampling.repetition_penalty
        logits[token] = float(np.float32(logits[token] / by if logits[token] > 0 else logits[token] * by))
    for token, times in Counter(output).items():
        penalty = sampling.presence_penalty + sampling.frequency_penalty * times
        logits[token] = float(np.float32(logits[token] - penalty))
    for token, added in sampling.logit_bias:
        logits[token] = float(np.float32(logits[token]) + np.float32(added))
    return [-math.inf if token in banned else logit for token, logit in enumerate(logits)]


def drawn_from(logits: Sequence[float], sampling: Sampling, index: int) -> int:
    """Greedy, or by temperature and min_p alone."""
    best = max(logits)
    if sampling.greedy:
        return logits.index(best)
    weights = [math.exp((x - best) / sampling.temperature) for x in logits]
    weights = [w if w >= sampling.min_p else 0.0 for w in weights]
    return int(np.searchsorted(np.cumsum(weights), sampler.uniform(sampling.seed, index) * sum(weights), side="right"))


def told(row: Floats, token: int, count: int) -> Logprobs:
    norm = math.log(sum(math.exp(float(x)) for x in row))
    likeliest = sorted(range(len(row)), key=lambda t: (-float(row[t]), t))[:count]
    return Logprobs(float(row[token]) - norm, tuple((t, float(row[t]) - norm) for t in likeliest))


def same(one: Logprobs | None, other: Logprobs, within: float = 1e-6) -> bool:
    return (
        one is not None
        and [t for t, _ in one.top] == [t for t, _ in other.top]
        and [one.token, *(v for _, v in one.top)]
        == pytest.approx([other.token, *(v for _, v in other.top)], abs=within)
    )


class Rows:
    """Logits of every draw that an executor of this process makes while it is watched, as they came from the model."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.of: dict[tuple[SequenceKey, int], Floats] = {}
        monkeypatch.setattr(pseudo_logits, "sample", self._sample)
        monkeypatch.setattr(torch_executor, "sample", self._sample)

    def _sample(self, rows: Floats, draws: Sequence[Draw], grammars: Masks | None = None) -> Drawn:
        for row, draw in zip(rows, draws, strict=True):
            assert draw.key is not None
            assert (draw.key, draw.index) not in self.of, "drawn twice"
            self.of[draw.key, draw.index] = row.copy()
        return sampler.sample(rows, draws, grammars)
