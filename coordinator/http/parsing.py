"""From the bytes of a body to what it says, and the first thing wrong with it by the name that the caller wrote."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from coordinator.constraints import MAX_GRAMMAR_BYTES
from coordinator.field_checks import check_bytes
from kvrelay.errors import InvalidArgument, Unimplemented

B = TypeVar("B", bound=BaseModel)

TRIED = ("str", "int", "constrained-int", "bool")
"""Types that unions have, by pydantic's words."""
HARMLESS: tuple[Any, ...] = (None, False, 0, "", [], {})
"""Values of a field that is not supported which ask for nothing."""


def parse(kind: type[B], raw: bytes | bytearray) -> B:
    """InvalidArgument for what is no JSON, no object or of a wrong type."""
    try:
        return kind.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    except UnicodeError:
        raise InvalidArgument("the body is not UTF-8") from None
    if first["type"] == "json_invalid":
        raise InvalidArgument(f"the body is not JSON: {first['msg'].removeprefix('Invalid JSON: ')}")
    if not first["loc"]:
        raise InvalidArgument("the body must be a JSON object")
    raise wrong(path_of(first["loc"]), first["msg"][:1].lower() + first["msg"][1:])


def path_of(location: Iterable[int | str]) -> str:
    """a.b[2] of ("a", "b", 2). What a union tried is left out: it stands behind the field itself."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not any(c in part for c in "[(,") and part not in TRIED:
            path += f".{part}" if path else part
    return path


def refuse(body: BaseModel, harmless: Mapping[str, tuple[Any, ...]], names: Iterable[str]) -> None:
    """Unimplemented names the first of these fields that asks for anything. harmless: further values that do not."""
    for name in names:
        value = getattr(body, name)
        if not any(value is none or (value == none and type(value) is type(none)) for none in HARMLESS):
            if value in harmless.get(name, ()):
                continue
            raise Unimplemented(f"{name}: is not supported", field=name)


def schema_text(field: str, schema: Any) -> str:
    """A JSON schema as text: an object, or text that is JSON already."""
    if isinstance(schema, str):
        check_bytes(field, schema, MAX_GRAMMAR_BYTES)
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise wrong(field, f"is not JSON: {error}") from None
    if not isinstance(schema, dict | bool):
        raise wrong(field, "must be a JSON schema, which is an object")
    _check_size(field, schema)
    return json.dumps(schema)


def _check_size(field: str, value: Any) -> None:
    """Its JSON is at least as long as what is counted here, which ends early for one that is too long."""
    size, left = 0, [value]
    while left and size <= MAX_GRAMMAR_BYTES:
        one = left.pop()
        size += 1
        if isinstance(one, str):
            size += len(one)
        elif isinstance(one, dict):
            left += (*one, *one.values())
        elif isinstance(one, list):
            left += one
    if size > MAX_GRAMMAR_BYTES:
        raise wrong(field, f"must be at most {MAX_GRAMMAR_BYTES} bytes of JSON")


def wrong(field: str, must: str) -> InvalidArgument:
    return InvalidArgument(f"{field}: {must}", field=field)
