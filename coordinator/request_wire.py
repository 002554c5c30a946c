"""kvrelay.v1.GenerateRequest as plain values. Judges only what cannot be a value at all.

And counts, before anything is copied out of a message: a request may name a million of something.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn, TypeVar

from coordinator import validate
from coordinator.constraints import Constraint, ConstraintKind
from coordinator.field_checks import wrong
from coordinator.raw import Limits, Message, RawRequest
from kvrelay.rpc.sampling_convert import priority_from_proto
from kvrelay.v1 import common_pb2, inference_pb2

T = TypeVar("T", dict[str, Any], list[Any])
OWN_KEYS = ("role", "content")
"""Of a message: they have fields of their own."""


def raw_request(request: inference_pb2.GenerateRequest, limits: Limits) -> RawRequest:
    """What the client sent. InvalidArgument for JSON that is none, enums that are unknown, and far too much."""
    validate.check_stops(len(request.stop))
    validate.check_stop_token_ids(len(request.stop_token_ids))
    return RawRequest(
        model=request.model,
        **_prompt(request, limits),
        **_sampling(request.sampling),
        max_tokens=request.max_tokens if request.HasField("max_tokens") else None,
        stop=tuple(request.stop),
        stop_token_ids=tuple(request.stop_token_ids),
        ignore_eos=request.ignore_eos,
        n=request.n if request.HasField("n") else None,
        cache_salt=request.cache_salt,
        client_request_id=request.client_request_id,
        prefix_cache=request.prefix_cache if request.HasField("prefix_cache") else None,
        min_tokens=request.min_tokens if request.HasField("min_tokens") else None,
        include_stop=request.include_stop,
        echo=request.echo,
        skip_special_tokens=request.skip_special_tokens if request.HasField("skip_special_tokens") else True,
        add_special_tokens=request.add_special_tokens if request.HasField("add_special_tokens") else True,
        truncate_prompt=request.truncate_prompt if request.HasField("truncate_prompt") else None,
        priority=priority_from_proto(request.priority, "priority"),
        constraint=_constraint(request),
    )


def _sampling(sampling: common_pb2.SamplingParams) -> dict[str, Any]:
    """The fields that are set: they have the same names on both sides."""
    validate.check_logit_bias_count(len(sampling.logit_bias))
    given = {descriptor.name: value for descriptor, value in sampling.ListFields()}
    return {**given, "logit_bias": tuple(sampling.logit_bias.items())}


def _prompt(request: inference_pb2.GenerateRequest, limits: Limits) -> dict[str, Any]:
    """The fields of the prompt. Of token ids only those that are used: a million are copied for 60 ms."""
    match request.WhichOneof("prompt"):
        case "text":
            return {"text": request.text}
        case "tokens":
            ids, most = request.tokens.ids, request.truncate_prompt
            left_out = max(0, len(ids) - most) if most > 0 else 0
            if ids:
                validate.check_prompt_length("tokens.ids", len(ids) - left_out, limits)
            return {"token_ids": tuple(ids[left_out:] if left_out else ids), "left_out": left_out}
        case "chat":
            return _chat(request.chat)
    return {}


def _chat(chat: inference_pb2.ChatMessages) -> dict[str, Any]:
    validate.check_messages(len(chat.messages))
    extras = [len(message.extra_json) for message in chat.messages if message.extra_json]
    validate.check_json(len(chat.tools_json) + len(chat.template_json) + sum(extras), len(extras))
    return {
        "chat": tuple(_message(at, message) for at, message in enumerate(chat.messages)),
        "tools": _json("chat.tools_json", chat.tools_json, list),
        "template_variables": _json("chat.template_json", chat.template_json, dict),
    }


def _message(at: int, message: inference_pb2.ChatMessage) -> Message:
    own = {"role": message.role, "content": message.content}
    if not message.extra_json:
        return own
    field = f"chat.messages[{at}].extra_json"
    extra = _json(field, message.extra_json, dict) or {}
    for key in OWN_KEYS:
        if key in extra:
            raise wrong(field, f"must not have {key!r}, which is a field of its own")
    return {**own, **extra}


def _json(field: str, text: str, kind: type[T]) -> T | None:
    """The value of this kind; None of an empty text."""
    if not text:
        return None
    try:
        value = json.loads(text, parse_constant=_no_number)
    except RecursionError:
        raise wrong(field, "is nested too deeply") from None
    except ValueError as error:
        raise wrong(field, f"is not JSON: {error}") from None
    if not isinstance(value, kind):
        raise wrong(field, f"must be a JSON {'object' if kind is dict else 'list'}")
    return value


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _constraint(request: inference_pb2.GenerateRequest) -> Constraint | None:
    name = request.WhichOneof("constraint")
    if name is None:
        return None
    kind = ConstraintKind(name)
    if kind is ConstraintKind.CHOICE:
        validate.check_choices(len(request.choice.texts))
        return Constraint(kind, choices=tuple(request.choice.texts))
    return Constraint(kind, getattr(request, name))
