"""What both kinds of generation have in their bodies, as a RawRequest's fields. Refuses what is known and not built."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from coordinator import validate
from coordinator.constraints import Constraint, ConstraintKind
from coordinator.http.parsing import refuse, schema_text, wrong
from coordinator.http.schemas import Generate
from kvrelay.errors import Unimplemented
from kvrelay.requests import Priority

REFUSED = (
    "use_beam_search",
    "length_penalty",
    "prompt_logprobs",
    "bad_words",
    "allowed_token_ids",
    "logits_processors",
    "return_tokens_as_token_ids",
    "return_token_ids",
)
HARMLESS: dict[str, tuple[Any, ...]] = {
    "length_penalty": (1, 1.0),
    "modalities": (["text"],),
    "function_call": ("none",),
}
PRIORITIES = {name.lower(): priority for name, priority in Priority.__members__.items()}
MAX_NUMBER = 1e300
"""Of a bias, before it is looked at as a float: JSON has whole numbers that are none."""
Given = tuple[str, Callable[[], Constraint]]
"""Where a constraint was written, and what makes it of what was written."""


@dataclass(frozen=True, slots=True)
class Common:
    """fields: of RawRequest. names: what this body calls some of them, see errors.param_of."""

    fields: dict[str, Any]
    names: dict[str, str]


def common(body: Generate, label: str) -> Common:
    """All but the prompt, log-probabilities and the default of max_tokens. label: from the header, which wins."""
    refuse(body, HARMLESS, REFUSED)
    validate.check_stop_token_ids(len(body.stop_token_ids or ()))
    constraint, names = _constraint(body)
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    fields: dict[str, Any] = {
        "model": body.model or "",
        "n": body.n,
        "stop": _stops(body.stop),
        "seed": None if body.seed is None else body.seed % 2**64,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": 0 if body.top_k == -1 else body.top_k,
        "min_p": body.min_p,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "repetition_penalty": body.repetition_penalty,
        "logit_bias": tuple(_biases(body.logit_bias)),
        "max_tokens": body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        "min_tokens": body.min_tokens,
        "ignore_eos": bool(body.ignore_eos),
        "stop_token_ids": tuple(body.stop_token_ids or ()),
        "include_stop": bool(body.include_stop_str_in_output),
        "skip_special_tokens": body.skip_special_tokens is not False,
        "truncate_prompt": None if body.truncate_prompt_tokens == -1 else body.truncate_prompt_tokens,
        "cache_salt": body.cache_salt or "",
        "client_request_id": label or body.user or "",
        "priority": _priority(body.priority),
        "constraint": constraint,
    }
    return Common(fields, names)


def _stops(value: Any) -> tuple[str, ...]:
    """A string, a list of strings or null."""
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise wrong("stop", "must be a string or a list of strings")
    validate.check_stops(len(value))
    for at, one in enumerate(value):
        if not isinstance(one, str):
            raise wrong(f"stop[{at}]", "must be a string")
    return tuple(value)


def _biases(biases: Any) -> Iterator[tuple[int, float]]:
    """Keys are token ids as text, as JSON has no others."""
    if biases is None:
        return
    if not isinstance(biases, dict):
        raise wrong("logit_bias", "must be an object from token ids to numbers")
    validate.check_logit_bias_count(len(biases))
    for key, added in biases.items():
        if type(added) not in (int, float) or abs(added) > MAX_NUMBER:
            raise wrong(f"logit_bias[{key[:20]}]", "must be a number in -100 .. 100")
        if not (key.isascii() and key.removeprefix("-").isdigit() and len(key) < 20):
            raise wrong("logit_bias", f"keys must be token ids, not {key[:40]!r}")
        yield int(key), float(added)


def _priority(value: int | str | None) -> Priority:
    """By name; or a number, of which a lower one goes first, as in vLLM: negative, 0, positive."""
    if value is None:
        return Priority.NORMAL
    if isinstance(value, str):
        if value.lower() not in PRIORITIES:
            raise wrong("priority", f"must be a whole number or one of {', '.join(PRIORITIES)}, not {value[:40]!r}")
        return PRIORITIES[value.lower()]
    return Priority.NORMAL if value == 0 else Priority.INTERACTIVE if value < 0 else Priority.BATCH


def _constraint(body: Generate) -> tuple[Constraint | None, dict[str, str]]:
    """The one constraint, and where its field was written. More than one is an error."""
    given = [*_of_format(body.response_format), *_of_structured(body), *_of_guided(body)]
    if not given:
        return None, {}
    if len(given) > 1:
        raise wrong(given[1][0], f"{given[0][0]} is set too; the output can be held to one of them")
    where, make = given[0]
    constraint = make()
    ours = "choice.texts" if constraint.kind is ConstraintKind.CHOICE else constraint.kind.value
    return constraint, {ours: where, constraint.kind.value: where}


def _of_format(response_format: dict[str, Any] | None) -> Iterator[Given]:
    kind = (response_format or {"type": "text"}).get("type")
    if kind == "text":
        return
    if kind == "json_object":
        yield "response_format", lambda: Constraint(ConstraintKind.JSON_SCHEMA, "{}")
    elif kind == "json_schema":
        inner = (response_format or {}).get("json_schema")
        where = "response_format.json_schema.schema"
        if not isinstance(inner, dict) or inner.get("schema") is None:
            raise wrong("response_format.json_schema", "must be an object with a schema")
        yield where, lambda: Constraint(ConstraintKind.JSON_SCHEMA, schema_text(where, inner["schema"]))
    elif kind in ("grammar", "structural_tag"):
        raise Unimplemented(f"response_format.type: {kind!r} is not supported", field="response_format.type")
    else:
        raise wrong("response_format.type", "must be text, json_object or json_schema")


def _of_structured(body: Generate) -> Iterator[Given]:
    given, at = body.structured_outputs, "structured_outputs"
    if given is None:
        return
    if given.structural_tag is not None:
        raise Unimplemented(f"{at}.structural_tag: is not supported", field=f"{at}.structural_tag")
    if given.json_object:
        yield f"{at}.json_object", lambda: Constraint(ConstraintKind.JSON_SCHEMA, "{}")
    yield from _each(f"{at}.json", given.json_, f"{at}.regex", given.regex, f"{at}.choice", given.choice)
    yield from _grammar(f"{at}.grammar", given.grammar)


def _of_guided(body: Generate) -> Iterator[Given]:
    """The older names of the same."""
    yield from _each(
        "guided_json", body.guided_json, "guided_regex", body.guided_regex, "guided_choice", body.guided_choice
    )
    yield from _grammar("guided_grammar", body.guided_grammar)


def _each(
    json_at: str, schema: Any, regex_at: str, regex: str | None, choice_at: str, choice: list[str] | None
) -> Iterator[Given]:
    if schema is not None:
        yield json_at, lambda: Constraint(ConstraintKind.JSON_SCHEMA, schema_text(json_at, schema))
    if regex is not None:
        yield regex_at, lambda: Constraint(ConstraintKind.REGEX, regex)
    if choice is not None:
        yield choice_at, lambda: Constraint(ConstraintKind.CHOICE, choices=tuple(choice))


def _grammar(where: str, grammar: str | None) -> Iterator[Given]:
    """Rules of GBNF have ::=, those of Lark a colon alone."""
    if grammar is not None:
        kind = ConstraintKind.EBNF if "::=" in grammar else ConstraintKind.LARK
        yield where, lambda: Constraint(kind, grammar)
