"""What the text of an answer must be. Knows no requests and no wires."""

from __future__ import annotations

import enum
from dataclasses import dataclass


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
