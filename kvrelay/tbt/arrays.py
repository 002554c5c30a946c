"""Arrays of numbers in the text of OTLP JSON, taken out before it is parsed. Knows nothing else of OTLP.

OTLP writes {"doubleValue":0.25} for each number, and a parser makes an object of each: five times the time of a bare
number. What does not look exactly like an exporter's compact output is left where it is, for the parser.
"""

from __future__ import annotations

import json
import re
from typing import Any

KEY = "numbers"
"""{"numbers": 3} stands in the text where the fourth array was; no AnyValue has such a key."""

# Inside a JSON string the quotes would be escaped, so this matches structure only.
_ARRAY = re.compile(rb'\{"arrayValue":\{"values":\[(\{"(?:double|int)Value":[^\]\[]*)\]\}\}')


def taken_out(text: bytes) -> tuple[bytes, list[list[float]]]:
    """The text with a reference in place of each array, and the arrays."""
    arrays: list[list[float]] = []

    def take(match: re.Match[bytes]) -> bytes:
        numbers = _numbers(match.group(1))
        if numbers is None:
            return match.group()
        arrays.append(numbers)
        return b'{"%s":%d}' % (KEY.encode(), len(arrays) - 1)

    return _ARRAY.sub(take, text), arrays


def _numbers(body: bytes) -> list[float] | None:
    bare = body.replace(b'{"doubleValue":', b"").replace(b'{"intValue":', b"").replace(b"}", b"").replace(b'"', b"")
    if bare.count(b",") != body.count(b"{") - 1:  # a number of an odd form: one value, one object
        return None
    try:
        values: list[Any] = json.loads(b"[" + bare + b"]")
    except ValueError:
        return None
    return values if {float, int}.issuperset(map(type, values)) else None
