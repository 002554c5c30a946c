"""Everything that a client may get wrong, in one place, against the limits that GetModel reports. Knows no protos.

Two steps, because the number of prompt tokens is known only after tokenizing: `check` and then `fit`. Every error is an
InvalidArgument (NotFound for the model) that names the field's path.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coordinator.constraints import Constraint
from kvrelay.errors import InvalidArgument, NotFound, Resource
from kvrelay.requests import Priority, Sampling, StopRule
from kvrelay.telemetry.calls import MAX_LABEL_BYTES

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_BYTES = 256
MAX_STOP_TOKEN_IDS = 256
MAX_TEMPERATURE = 100.0
GREEDY_BELOW = 1e-5
"""A temperature under this is greedy: dividing logits by it would leave nothing but infinities."""
MAX_N = 16
MAX_SALT_BYTES = 256


Message = Mapping[str, Any]
"""One of a chat, as the template reads it: role and content, and what else it has (name, tool_calls, ...)."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request must keep to. context_limit: prompt and output tokens together."""

    model_id: str
    vocab_size: int
    context_limit: int
    eos_token_ids: tuple[int, ...]
    has_chat_template: bool = False


@dataclass(frozen=True, slots=True)
class RawRequest:
    """What the client sent; None where a field was absent. Exactly one of text, token_ids and chat should be set."""

    model: str = ""
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    chat: tuple[Message, ...] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int | None = None
    cache_salt: str = ""
    client_request_id: str = ""
    prefix_cache: bool | None = None
    tools: Sequence[Any] | None = None
    template_variables: Mapping[str, Any] | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    min_tokens: int | None = None
    include_stop: bool = False
    echo: bool = False
    skip_special_tokens: bool = True
    add_special_tokens: bool = True
    truncate_prompt: int | None = None
    priority: Priority = Priority.NORMAL
    constraint: Constraint | None = None


def check(raw: RawRequest, limits: Limits) -> None:
    """All that can be said before the prompt is tokenized."""
    check_model(raw.model, limits)
    _check_n(raw.n)
    _check_prompt(raw, limits)
    _check_sampling(raw)
    if raw.max_tokens is not None and raw.max_tokens < 1:
        raise _wrong("max_tokens", f"must be at least 1, not {raw.max_tokens}")
    _check_stops(raw.stop)
    _check_ids("stop_token_ids", raw.stop_token_ids, limits.vocab_size, MAX_STOP_TOKEN_IDS)
    _check_bytes("cache_salt", raw.cache_salt, MAX_SALT_BYTES)
    _check_bytes("client_request_id", raw.client_request_id, MAX_LABEL_BYTES)


def check_length(raw: RawRequest, text: str, longest_token: int, limits: Limits) -> None:
    """Refuses a text that is too long whatever its tokens are, so that nobody tokenizes it."""
    if longest_token and len(text) > limits.context_limit * longest_token:
        longest = limits.context_limit - 1
        raise _wrong(
            _prompt_field(raw), f"has {len(text)} characters; a prompt has 1 .. {longest} tokens (context - 1)"
        )


def fit(raw: RawRequest, num_prompt_tokens: int, limits: Limits) -> StopRule:
    """The rule that ends this request, once its prompt has `num_prompt_tokens` tokens."""
    field = _prompt_field(raw)
    if num_prompt_tokens < 1:
        raise _wrong(field, "must not be empty: the prompt has no tokens")
    if num_prompt_tokens >= limits.context_limit:
        longest = limits.context_limit - 1
        raise _wrong(field, f"has {num_prompt_tokens} tokens; a prompt has 1 .. {longest} (context - 1)")
    room = limits.context_limit - num_prompt_tokens
    if raw.max_tokens is not None and raw.max_tokens > room:
        context = limits.context_limit
        reason = f"context {context} - prompt {num_prompt_tokens}"
        raise _wrong("max_tokens", f"must be 1 .. {room} ({reason}), not {raw.max_tokens}")
    eos = () if raw.ignore_eos else limits.eos_token_ids
    return StopRule(raw.max_tokens or room, frozenset(eos) | frozenset(raw.stop_token_ids))


def sampling_of(raw: RawRequest, drawn_seed: int, limits: Limits) -> Sampling:
    """Sampling with the server's defaults where the client said nothing. Call `check` first."""
    temperature = 1.0 if raw.temperature is None else raw.temperature
    return Sampling(
        temperature=0.0 if temperature < GREEDY_BELOW else temperature,
        top_p=1.0 if raw.top_p is None else raw.top_p,
        top_k=min(raw.top_k or 0, limits.vocab_size),
        seed=drawn_seed if raw.seed is None else raw.seed,
    )


def check_model(model: str, limits: Limits) -> None:
    """Empty means the one model served."""
    if model and model != limits.model_id:
        raise NotFound(
            f"model {model!r} is not served here; this is {limits.model_id!r}",
            field="model",
            resource=Resource("model", model),
        )


def check_token_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Names the first position whose id is outside the vocabulary."""
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        return
    at = next(i for i, t in enumerate(token_ids) if not 0 <= t < vocab_size)
    raise _wrong(f"{field}[{at}]", f"must be 0 .. {vocab_size - 1}, not {token_ids[at]}")


def _check_n(n: int | None) -> None:
    if n is not None and not 1 <= n <= MAX_N:
        raise _wrong("n", f"must be 1 .. {MAX_N}, not {n}")


def _check_prompt(raw: RawRequest, limits: Limits) -> None:
    if raw.text is not None:
        if not raw.text:
            raise _wrong("text", "must not be empty")
    elif raw.token_ids is not None:
        if not raw.token_ids:
            raise _wrong("tokens.ids", "must not be empty")
        check_token_ids("tokens.ids", raw.token_ids, limits.vocab_size)
    elif raw.chat is not None:
        _check_chat(raw.chat, limits)
    else:
        raise InvalidArgument("prompt: one of text, tokens and chat must be set", field="prompt")


def _check_chat(messages: Sequence[Message], limits: Limits) -> None:
    if not limits.has_chat_template:
        raise _wrong("chat", f"model {limits.model_id!r} has no chat template")
    if not messages:
        raise _wrong("chat.messages", "must not be empty")
    for at, message in enumerate(messages):
        if not message.get("role"):
            raise _wrong(f"chat.messages[{at}].role", "must not be empty")


def _check_sampling(raw: RawRequest) -> None:
    t, p, k = raw.temperature, raw.top_p, raw.top_k
    if t is not None and not (math.isfinite(t) and 0.0 <= t <= MAX_TEMPERATURE):
        raise _wrong("sampling.temperature", f"must be a number in 0 .. {MAX_TEMPERATURE:g}, not {t}")
    if p is not None and not (math.isfinite(p) and 0.0 < p <= 1.0):
        raise _wrong("sampling.top_p", f"must be a number above 0 and at most 1, not {p}")
    if k is not None and k < 0:
        raise _wrong("sampling.top_k", f"must be at least 0 (0 is off), not {k}")


def _check_stops(stops: Sequence[str]) -> None:
    if len(stops) > MAX_STOP_STRINGS:
        raise _wrong("stop", f"at most {MAX_STOP_STRINGS} stop strings, not {len(stops)}")
    for at, stop in enumerate(stops):
        if not stop:
            raise _wrong(f"stop[{at}]", "must not be empty")
        _check_bytes(f"stop[{at}]", stop, MAX_STOP_STRING_BYTES)


def _check_ids(field: str, token_ids: Sequence[int], vocab_size: int, most: int) -> None:
    if len(token_ids) > most:
        raise _wrong(field, f"at most {most} ids, not {len(token_ids)}")
    check_token_ids(field, token_ids, vocab_size)


def _check_bytes(field: str, text: str, most: int) -> None:
    size = len(text.encode("utf-8", "replace"))
    if size > most:
        raise _wrong(field, f"must be at most {most} bytes of UTF-8, not {size}")


def _prompt_field(raw: RawRequest) -> str:
    if raw.text is not None:
        return "text"
    return "tokens.ids" if raw.token_ids is not None else "chat"


def _wrong(field: str, must: str) -> InvalidArgument:
    return InvalidArgument(f"{field}: {must}", field=field)
