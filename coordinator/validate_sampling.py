"""How a client wants tokens to be drawn: judged field by field, then with the server's defaults. Knows no prompts."""

from __future__ import annotations

from coordinator.constraints import MAX_CHOICES, Constraint
from coordinator.field_checks import check_count, check_number, shown, wrong
from coordinator.raw import Limits, RawRequest
from kvrelay.requests import Sampling

MAX_TEMPERATURE = 100.0
GREEDY_BELOW = 1e-5
"""A temperature under this is greedy: dividing logits by it would leave nothing but infinities."""
MAX_SEED = 2**64 - 1
MAX_REPETITION_PENALTY = 100.0
MAX_PENALTY = 2.0
"""Of presence and of frequency, either way."""
MAX_LOGIT_BIAS = 1024
"""Entries."""
MAX_BIAS = 100.0
"""Of one logit, either way: enough to forbid a token or to force it."""
MAX_LOGPROBS = 20


def check_sampling(raw: RawRequest, limits: Limits) -> None:
    check_number("sampling.temperature", raw.temperature, 0.0, MAX_TEMPERATURE)
    check_number("sampling.top_p", raw.top_p, 0.0, 1.0, above=True)
    if raw.top_k is not None and raw.top_k < 0:
        raise wrong("sampling.top_k", f"must be at least 0 (0 is off), not {shown(raw.top_k)}")
    if raw.seed is not None and not 0 <= raw.seed <= MAX_SEED:
        raise wrong("sampling.seed", f"must be 0 .. {MAX_SEED}, not {shown(raw.seed)}")
    check_number("sampling.min_p", raw.min_p, 0.0, 1.0)
    check_number("sampling.repetition_penalty", raw.repetition_penalty, 0.0, MAX_REPETITION_PENALTY, above=True)
    check_number("sampling.presence_penalty", raw.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
    check_number("sampling.frequency_penalty", raw.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
    if raw.logprobs is not None and not 0 <= raw.logprobs <= MAX_LOGPROBS:
        raise wrong("sampling.logprobs", f"must be 0 .. {MAX_LOGPROBS}, not {shown(raw.logprobs)}")
    _check_bias(raw.logit_bias, limits.vocab_size)


def check_logit_bias_count(count: int) -> None:
    check_count("sampling.logit_bias", count, MAX_LOGIT_BIAS, "entries")


def _check_bias(biases: tuple[tuple[int, float], ...], vocab_size: int) -> None:
    check_logit_bias_count(len(biases))
    for token_id, added in biases:
        field = f"sampling.logit_bias[{shown(token_id)}]"
        if not 0 <= token_id < vocab_size:
            raise wrong(field, f"a token id must be 0 .. {vocab_size - 1}")
        check_number(field, added, -MAX_BIAS, MAX_BIAS)


def check_choices(count: int) -> None:
    check_count("choice.texts", count, MAX_CHOICES, "texts")


def check_end(constraint: Constraint, ignore_eos: bool) -> None:
    """A text that is held to a grammar must be able to end."""
    if ignore_eos:
        name = constraint.kind.value
        raise wrong("ignore_eos", f"must be false with {name}: where the text is complete, only EOS can follow")


def sampling_of(raw: RawRequest, drawn_seed: int, limits: Limits, grammar: str = "") -> Sampling:
    """Sampling with the server's defaults where the client said nothing. Call `check` first.

    grammar: what the constraint was compiled to.
    """
    temperature = 1.0 if raw.temperature is None else raw.temperature
    return Sampling(
        temperature=0.0 if temperature < GREEDY_BELOW else temperature,
        top_p=1.0 if raw.top_p is None else raw.top_p,
        top_k=min(raw.top_k or 0, limits.vocab_size),
        seed=drawn_seed if raw.seed is None else raw.seed,
        min_p=raw.min_p or 0.0,
        repetition_penalty=1.0 if raw.repetition_penalty is None else raw.repetition_penalty,
        presence_penalty=raw.presence_penalty or 0.0,
        frequency_penalty=raw.frequency_penalty or 0.0,
        logit_bias=tuple(sorted(dict(raw.logit_bias).items())),
        grammar=grammar,
        logprobs=raw.logprobs,
    )
