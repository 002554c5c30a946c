"""What the text of an answer must be, and the grammar that says so. Knows no requests and no wires.

`compile_grammar` hands what a client wrote to llguidance, which a hostile text can make slow, big or crash: it is
called in a process of its own (coordinator.trial), never in one that serves.
"""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass
from typing import Any

from coordinator.field_checks import wrong
from coordinator.gbnf import lark_of

MAX_GRAMMAR_BYTES = 65_536
"""Of what a client wrote; of all choices together."""
MAX_COMPILED_BYTES = 160 * 1024
"""Of what is made of it, in which some characters take up to seven times their room: it travels in one frame with the
rest of a sequence (kvrelay.session.MAX_FRAME_BYTES)."""
MAX_CHOICES = 256
WHITESPACE = r"\n?[ \t]{0,32}"
"""Between the parts of a JSON text. Without a bound, a model may write spaces until its tokens are used up."""


class ConstraintKind(enum.StrEnum):
    """By the name of the field that gives it."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    LARK = "lark"
    EBNF = "ebnf"


@dataclass(frozen=True, slots=True)
class Constraint:
    """text: of all kinds but CHOICE, whose answers are `choices`."""

    kind: ConstraintKind
    text: str = ""
    choices: tuple[str, ...] = ()


def check_constraint(constraint: Constraint) -> None:
    """What can be said at once, in microseconds. InvalidArgument names the field."""
    if constraint.kind is ConstraintKind.CHOICE:
        _check_choices(constraint.choices)
    else:
        _check_text(constraint.kind, constraint.text)


def compile_grammar(constraint: Constraint) -> str:
    """The grammar as llguidance's matcher takes it, not yet tried. InvalidArgument names the field."""
    check_constraint(constraint)
    match constraint.kind:
        case ConstraintKind.JSON_SCHEMA:
            grammar: dict[str, Any] = {"json_schema": _schema(constraint.text)}
        case ConstraintKind.REGEX:
            grammar = {"lark_grammar": _regex(constraint.text)}
        case ConstraintKind.CHOICE:
            grammar = {"lark_grammar": "start: " + " | ".join(map(_quoted, dict.fromkeys(constraint.choices)))}
        case ConstraintKind.LARK:
            grammar = {"lark_grammar": constraint.text}
        case ConstraintKind.EBNF:
            grammar = {"lark_grammar": lark_of(constraint.text)}
    # Always in this form: llguidance takes a text that begins with a brace for it, whatever field it came in.
    compiled = json.dumps({"grammars": [grammar]}, ensure_ascii=False, separators=(",", ":"))
    size = len(compiled.encode("utf-8", "surrogatepass"))  # of what a schema escapes; llguidance refuses it by name
    if size > MAX_COMPILED_BYTES:
        field = "choice.texts" if constraint.kind is ConstraintKind.CHOICE else str(constraint.kind)
        raise wrong(field, f"must have at most {MAX_COMPILED_BYTES} bytes as a grammar, not {size}")
    return compiled


def _schema(text: str) -> dict[str, Any]:
    """The schema with the whitespace of this server. {} stands for any object, as OpenAI's json_object does."""
    try:
        schema = json.loads(text)
    except RecursionError:
        raise wrong("json_schema", "is nested too deeply") from None
    except ValueError as error:
        raise wrong("json_schema", f"is not JSON: {error}") from None
    if not isinstance(schema, dict):
        raise wrong("json_schema", "must be a JSON object")
    if "x-guidance" in schema:
        raise wrong("json_schema", "x-guidance is not supported: the server decides how a schema is read")
    return {**(schema or {"type": "object"}), "x-guidance": {"whitespace_pattern": WHITESPACE}}


def _regex(pattern: str) -> str:
    from llguidance import regex_to_lark

    return f"start: /{regex_to_lark(pattern)}/"


def _quoted(text: str) -> str:
    """Lark writes texts as JSON does, but wants DEL escaped too."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _check_choices(choices: tuple[str, ...]) -> None:
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise wrong("choice.texts", f"must be 1 .. {MAX_CHOICES} texts, not {len(choices)}")
    for i, text in enumerate(choices):
        _check_text(f"choice.texts[{i}]", text)
    total = sum(len(text.encode()) for text in choices)
    if total > MAX_GRAMMAR_BYTES:
        raise wrong("choice.texts", f"must have at most {MAX_GRAMMAR_BYTES} bytes together, not {total}")


def _check_text(field: str, text: str) -> None:
    if not text:
        raise wrong(field, "must not be empty")
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise wrong(field, "holds half of a surrogate pair: it has no UTF-8") from None
    if size > MAX_GRAMMAR_BYTES:
        raise wrong(field, f"must have at most {MAX_GRAMMAR_BYTES} bytes, not {size}")
