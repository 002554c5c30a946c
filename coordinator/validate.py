"""Everything that a client may get wrong, in one place, against the limits that GetModel reports. Knows no protos.

Two steps, because the number of prompt tokens is known only after tokenizing: `check` and then `fit`. Every error is an
InvalidArgument (NotFound for the model) that names the field's path. How tokens are drawn has a module of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from coordinator.constraints import MAX_GRAMMAR_BYTES, check_constraint
from coordinator.field_checks import check_bytes, check_count, check_token_ids, check_unicode, shown, wrong
from coordinator.raw import Limits, Message, RawRequest
from coordinator.validate_sampling import (
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    check_choices,
    check_end,
    check_logit_bias_count,
    check_sampling,
    sampling_of,
)
from kvrelay.errors import InvalidArgument, NotFound, Resource
from kvrelay.requests import StopRule
from kvrelay.telemetry.calls import MAX_LABEL_BYTES

__all__ = [
    "MAX_GRAMMAR_BYTES",
    "MAX_LOGIT_BIAS",
    "MAX_LOGPROBS",
    "MAX_TEXT_BYTES",
    "MAX_TOKEN_IDS",
    "Limits",
    "Message",
    "RawRequest",
    "check",
    "check_choices",
    "check_json",
    "check_length",
    "check_logit_bias_count",
    "check_messages",
    "check_model",
    "check_prompt_length",
    "check_stop_token_ids",
    "check_stops",
    "check_text_to_tokenize",
    "check_token_ids",
    "check_token_ids_count",
    "fit",
    "last_of",
    "sampling_of",
]

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_BYTES = 256
MAX_STOP_TOKEN_IDS = 256
MAX_N = 16
MAX_SALT_BYTES = 256
MAX_MESSAGES = 8192
"""Of one chat."""
MAX_JSON_LENGTH = 256 * 1024
"""Characters of JSON in one chat: tools, variables of the template and further keys of messages. At most 25 ms."""
MAX_JSON_TEXTS = 1024
"""Messages of one chat with further keys, which are JSON each: 4 us apiece, however short."""
MAX_TEXT_BYTES = 1024 * 1024
"""Of a text that is only tokenized."""
MAX_TOKEN_IDS = 262_144
"""Ids that are only turned into text: copied for 16 ms."""
OWN_VARIABLES = frozenset(("messages", "tools", "raise_exception", "bos_token", "eos_token", "unk_token", "pad_token"))
"""Of a template, and judged elsewhere or the model's own: no request may replace them."""


def check(raw: RawRequest, limits: Limits) -> None:
    """All that can be said before the prompt is tokenized."""
    check_model(raw.model, limits)
    if raw.n is not None and not 1 <= raw.n <= MAX_N:
        raise wrong("n", f"must be 1 .. {MAX_N}, not {shown(raw.n)}")
    if raw.truncate_prompt is not None and raw.truncate_prompt < 1:
        raise wrong("truncate_prompt", f"must be at least 1, not {shown(raw.truncate_prompt)}")
    _check_prompt(raw, limits)
    check_sampling(raw, limits)
    _check_end(raw, limits)
    if raw.constraint is not None:
        check_constraint(raw.constraint)
        check_end(raw.constraint, raw.ignore_eos)
    check_bytes("cache_salt", raw.cache_salt, MAX_SALT_BYTES)
    check_bytes("client_request_id", raw.client_request_id, MAX_LABEL_BYTES)


def check_length(raw: RawRequest, text: str, longest_token: int, limits: Limits) -> None:
    """Refuses a text that is too long whatever its tokens are, so that nobody tokenizes it."""
    if longest_token and raw.truncate_prompt is None and len(text) > limits.context_limit * longest_token:
        longest = limits.context_limit - 1
        raise wrong(raw.prompt_field, f"has {len(text)} characters; a prompt has 1 .. {longest} tokens (context - 1)")


def check_prompt_length(field: str, num_prompt_tokens: int, limits: Limits) -> None:
    if num_prompt_tokens < 1:
        raise wrong(field, "must not be empty: the prompt has no tokens")
    if num_prompt_tokens >= limits.context_limit:
        longest = limits.context_limit - 1
        raise wrong(field, f"has {num_prompt_tokens} tokens; a prompt has 1 .. {longest} (context - 1)")


def fit(raw: RawRequest, num_prompt_tokens: int, limits: Limits) -> StopRule:
    """The rule that ends this request, once its prompt has `num_prompt_tokens` tokens, after it was truncated."""
    check_prompt_length(raw.prompt_field, num_prompt_tokens, limits)
    room = limits.context_limit - num_prompt_tokens
    reason = f"context {limits.context_limit} - prompt {num_prompt_tokens}"
    if raw.max_tokens is not None and raw.max_tokens > room:
        raise wrong("max_tokens", f"must be 1 .. {room} ({reason}), not {shown(raw.max_tokens)}")
    min_tokens = raw.min_tokens or 0
    if min_tokens > room:
        raise wrong("min_tokens", f"must be 0 .. {room} ({reason}), not {shown(min_tokens)}")
    eos = () if raw.ignore_eos else limits.eos_token_ids
    usual = room if raw.usual_tokens is None else min(room, max(raw.usual_tokens, min_tokens))
    return StopRule(raw.max_tokens or usual, frozenset(eos) | frozenset(raw.stop_token_ids), min_tokens)


def check_model(model: str, limits: Limits) -> None:
    """Empty means the one model served."""
    if model and model != limits.model_id:
        said = f"model {shown(model)} is not served here; this is {limits.model_id!r}"
        raise NotFound(said, field="model", resource=Resource("model", model))


def check_stops(count: int) -> None:
    check_count("stop", count, MAX_STOP_STRINGS, "stop strings")


def check_stop_token_ids(count: int) -> None:
    check_count("stop_token_ids", count, MAX_STOP_TOKEN_IDS, "ids")


def check_messages(count: int) -> None:
    if not count:
        raise wrong("chat.messages", "must not be empty")
    check_count("chat.messages", count, MAX_MESSAGES, "messages")


def check_json(length: int, extras: int, field: str = "chat") -> None:
    """Before any of it is parsed. length: of all of it together; extras: texts of it that belong to messages."""
    check_count(field, length, MAX_JSON_LENGTH, "characters of JSON")
    check_count(field, extras, MAX_JSON_TEXTS, "messages or calls with JSON of their own")


def check_text_to_tokenize(text: str) -> None:
    check_bytes("text", text, MAX_TEXT_BYTES)


def check_token_ids_count(count: int) -> None:
    check_count("token_ids", count, MAX_TOKEN_IDS, "ids")


def _check_prompt(raw: RawRequest, limits: Limits) -> None:
    if raw.text is not None:
        if not raw.text:
            raise wrong("text", "must not be empty")
        check_unicode("text", raw.text)
    elif raw.token_ids is not None:
        _check_prompt_ids(raw, raw.token_ids, limits)
    elif raw.chat is not None:
        _check_chat(raw.chat, limits)
        _check_variables(raw.template_variables or {})
    else:
        raise InvalidArgument("prompt: one of text, tokens and chat must be set", field="prompt")


def _check_prompt_ids(raw: RawRequest, token_ids: tuple[int, ...], limits: Limits) -> None:
    """Those that are used: too many of them first, as nobody need look at each of a million then."""
    used, first = last_of(token_ids, raw.truncate_prompt), raw.left_out
    check_prompt_length("tokens.ids", len(used), limits)
    check_token_ids("tokens.ids", used, limits.vocab_size, first + len(token_ids) - len(used))


def last_of(token_ids: tuple[int, ...], most: int | None) -> tuple[int, ...]:
    """A prompt as truncate_prompt leaves it."""
    return token_ids if most is None else token_ids[-most:]


def _check_chat(messages: Sequence[Message], limits: Limits) -> None:
    if not limits.has_chat_template:
        raise wrong("chat", f"model {limits.model_id!r} has no chat template")
    check_messages(len(messages))
    for at, message in enumerate(messages):
        role = message.get("role")
        if not role or not isinstance(role, str):
            raise wrong(f"chat.messages[{at}].role", "must be the name of a role and not empty")


def _check_variables(variables: Mapping[str, Any]) -> None:
    for name in variables:
        if name in OWN_VARIABLES:
            raise wrong("chat.template_json", f"must not have {name!r}, which is not the request's to say")


def _check_end(raw: RawRequest, limits: Limits) -> None:
    """What ends the output. That it fits the context is for `fit` to say."""
    most, least = raw.max_tokens, raw.min_tokens
    if most is not None and most < 1:
        raise wrong("max_tokens", f"must be at least 1, not {shown(most)}")
    if least is not None and (least < 0 or (most is not None and least > most)):
        raise wrong("min_tokens", f"must be 0 .. max_tokens{'' if most is None else f' ({most})'}, not {shown(least)}")
    check_stops(len(raw.stop))
    for at, stop in enumerate(raw.stop):
        if not stop:
            raise wrong(f"stop[{at}]", "must not be empty")
        check_bytes(f"stop[{at}]", stop, MAX_STOP_STRING_BYTES)
    check_stop_token_ids(len(raw.stop_token_ids))
    check_token_ids("stop_token_ids", raw.stop_token_ids, limits.vocab_size)
