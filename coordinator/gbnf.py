"""GBNF, llama.cpp's notation of grammars, to Lark's. Knows no requests.

llguidance brings a converter; this refuses by name what that one would turn into something else, and spells escapes
as it can read them. Hostile texts make it slow: call it where coordinator.constraints says.
"""

from __future__ import annotations

import re

from coordinator.field_checks import shown, wrong
from kvrelay.errors import InvalidArgument

FIELD = "ebnf"
MAX_RULES = 1000
MAX_NESTING = 100
_PART = re.compile(
    r'(?P<literal>"(?:\\.|[^"\\])*")|(?P<klass>\[(?:\\.|[^\]\\])*\])|(?P<comment>#[^\r\n]*)|(?P<bracket>[()])|(?P<any>\.)'
)
_ESCAPE = re.compile(r"\\(?:x(?P<x>[0-9A-Fa-f]{2})|u(?P<u>[0-9A-Fa-f]{4})|U(?P<U>[0-9A-Fa-f]{8})|.)", re.DOTALL)
_ANY = "[\\x00-\U0010ffff]"
"""What a dot stands for; in Lark it leaves newlines out."""
_SET_OPERATORS = ("&&", "--", "~~")
"""Of the regexes that classes become; in GBNF they are plain characters."""


def lark_of(text: str) -> str:
    """InvalidArgument (field ebnf) for what is no GBNF, or cannot be said in Lark."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if text.count("::=") > MAX_RULES:
        raise wrong(FIELD, f"must have at most {MAX_RULES} rules, not {text.count('::=')}")
    try:
        return str(gbnf_to_lark(_prepared(text)))
    except RecursionError:
        raise wrong(FIELD, "is nested too deeply") from None
    except InvalidArgument:
        raise
    except Exception as error:  # the converter raises plain Exception
        raise wrong(FIELD, f"is not GBNF: {error}") from None


def _prepared(text: str) -> str:
    """The text with the escapes of characters spelt out, and without comments: the converter moves them about."""
    depth = 0

    def part(match: re.Match[str]) -> str:
        nonlocal depth
        whole = match[0]
        if match["comment"] is not None:
            return ""
        if match["bracket"] is not None:
            depth += 1 if whole == "(" else -1
            if depth > MAX_NESTING:
                raise wrong(FIELD, f"must be nested at most {MAX_NESTING} deep")
            return whole
        if match["any"] is not None:
            return _ANY
        if match["klass"] is not None:
            _check_class(whole)
        return _ESCAPE.sub(_spelt, whole)

    return _PART.sub(part, text)


def _check_class(text: str) -> None:
    for operator in _SET_OPERATORS:
        if operator in text:
            raise wrong(
                FIELD, f"{shown(text)}: {operator} in a class is not supported: write its second character as an escape"
            )


def _spelt(escape: re.Match[str]) -> str:
    r"""The character itself if it needs no escape, else \xHH; escapes of other kinds as they are."""
    digits = escape["x"] or escape["u"] or escape["U"]
    if digits is None:
        return escape[0]
    code = int(digits, 16)
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise wrong(FIELD, f"{escape[0]} is no character")
    return chr(code) if code > 0xFF or chr(code).isalnum() else f"\\x{code:02x}"
