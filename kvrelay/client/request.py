"""Prompt and options -> the request of a generation. Refuses what does not fit the wire; the rest the server judges."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.message import Message

from kvrelay.client.options import GenerateOptions, Prompt
from kvrelay.errors import InvalidArgument
from kvrelay.v1 import common_pb2, inference_pb2

GENERATE = "/kvrelay.v1.InferenceService/Generate"
SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logprobs",
)
PLAIN = (
    "max_tokens",
    "min_tokens",
    "ignore_eos",
    "include_stop",
    "echo",
    "skip_special_tokens",
    "add_special_tokens",
    "truncate_prompt",
    "cache_salt",
    "model",
    "n",
    "prefix_cache",
)
"""Options that the message has as fields of the same name and type."""
CONSTRAINTS = ("json_schema", "regex", "choice", "lark", "ebnf")
PRIORITIES = {
    "batch": common_pb2.PRIORITY_BATCH,
    "normal": common_pb2.PRIORITY_NORMAL,
    "interactive": common_pb2.PRIORITY_INTERACTIVE,
}


def generate_request(prompt: Prompt, options: GenerateOptions) -> inference_pb2.GenerateRequest:
    """The request of a generation. InvalidArgument names what does not even fit the wire; the rest is the server's."""
    request = inference_pb2.GenerateRequest()
    _fill_prompt(request, prompt)
    _fill_template(request, options)
    for name in SAMPLING:
        assign(request.sampling, name, options.get(name), f"sampling.{name}")
    _fill_bias(request, options.get("logit_bias") or {})
    for name in PLAIN:
        assign(request, name, options.get(name), name)
    assign(request, "client_request_id", options.get("request_label"), "client_request_id")
    stop = options.get("stop") or ()
    extend(request.stop, (stop,) if isinstance(stop, str) else stop, "stop")
    extend(request.stop_token_ids, options.get("stop_token_ids") or (), "stop_token_ids")
    _fill_priority(request, options.get("priority"))
    _fill_constraint(request, options)
    return request


def assign(message: Message, name: str, value: object, path: str) -> None:
    """Sets a field unless the value is None. Protobuf's own refusals (type, range, lone surrogates) name no field."""
    if value is None:
        return
    try:
        setattr(message, name, value)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"{path} cannot be sent: {error}", field=path) from error


def extend(repeated: Any, values: Sequence[object], path: str) -> None:
    """Extends a repeated field of any scalar type."""
    try:
        repeated.extend(values)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"{path} cannot be sent: {error}", field=path) from error


def _fill_prompt(request: inference_pb2.GenerateRequest, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        return assign(request, "text", prompt, "text")
    if prompt and isinstance(prompt[0], Mapping):
        for index, message in enumerate(prompt):
            where = f"chat.messages[{index}]"
            if not isinstance(message, Mapping):
                raise InvalidArgument(f"{where} is not a mapping with role and content", field=where)
            _fill_message(request.chat.messages.add(), message, where)
        return None
    request.tokens.SetInParent()
    return extend(request.tokens.ids, prompt, "tokens.ids")


def _fill_message(added: inference_pb2.ChatMessage, message: Mapping[str, Any], where: str) -> None:
    """A content of None stays empty, as the wire has no None for it."""
    for name in ("role", "content"):
        assign(added, name, message.get(name), f"{where}.{name}")
    extra = {key: value for key, value in message.items() if key not in ("role", "content")}
    if extra:
        assign(added, "extra_json", _json(extra, where), where)


def _fill_template(request: inference_pb2.GenerateRequest, options: GenerateOptions) -> None:
    for name, field in (("tools", "tools_json"), ("template_variables", "template_json")):
        value: object = options.get(name)
        if not value:
            continue
        if request.WhichOneof("prompt") != "chat":
            raise InvalidArgument(f"{name} needs a prompt of chat messages", field=f"chat.{field}")
        assign(request.chat, field, _json(value, f"chat.{field}"), f"chat.{field}")


def _fill_bias(request: inference_pb2.GenerateRequest, bias: Mapping[int, float]) -> None:
    for token_id, added in bias.items():
        try:
            request.sampling.logit_bias[token_id] = added
        except (TypeError, ValueError) as error:
            path = f"sampling.logit_bias[{token_id}]"
            raise InvalidArgument(f"{path} cannot be sent: {error}", field=path) from error


def _fill_priority(request: inference_pb2.GenerateRequest, name: str | None) -> None:
    if name is None:
        return
    if name not in PRIORITIES:
        raise InvalidArgument(f"priority must be one of {', '.join(PRIORITIES)}, not {name!r}", field="priority")
    request.priority = PRIORITIES[name]


def _fill_constraint(request: inference_pb2.GenerateRequest, options: GenerateOptions) -> None:
    given = {name: options[name] for name in CONSTRAINTS if options.get(name) is not None}  # type: ignore[literal-required]  # names of ConstraintOptions
    if len(given) > 1:
        first, second, *_ = given
        raise InvalidArgument(f"{second}: {first} is given too; the output has one constraint at most", field=second)
    for name, value in given.items():
        if name == "choice":
            request.choice.SetInParent()
            extend(request.choice.texts, (value,) if isinstance(value, str) else value, "choice.texts")
        else:
            assign(request, name, _json(value, name) if isinstance(value, Mapping) else value, name)


def _json(value: object, path: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"{path} is not JSON: {error}", field=path) from error
