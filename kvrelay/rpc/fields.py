"""Strict readers of proto fields: each returns the value or raises an error that names the path. Knows no message.

proto3 scalars have no presence: for them "missing" means empty or zero where that is never a good value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeVar

from google.protobuf.message import Message

from kvrelay.errors import Internal, InvalidArgument, Unimplemented

T = TypeVar("T")
MAX_NAME = 512
"""Characters of an id, an address, an error's class: whatever names something."""


def understood(answer: T | None, what: str) -> T:
    """An answer of a server. gRPC logs bytes that are no such message and gives None then: Internal, naming what."""
    if answer is None:
        raise Internal(f"{what} sent what is no message of this protocol")
    return answer


def text(value: str, path: str) -> str:
    """A name: a string that must not be empty, and is short, as many of them may be kept at once."""
    if not value:
        raise InvalidArgument(f"{path} is missing or empty", field=path)
    if len(value) > MAX_NAME:
        raise InvalidArgument(f"{path} must have at most {MAX_NAME} characters, not {len(value)}", field=path)
    return value


def raw(value: bytes, path: str) -> bytes:
    """Bytes that must not be empty."""
    if not value:
        raise InvalidArgument(f"{path} is missing or empty", field=path)
    return value


def at_least(value: int, low: int, path: str) -> int:
    if value < low:
        raise InvalidArgument(f"{path} must be at least {low}, not {value}", field=path)
    return value


def at_most(value: int, high: int, path: str) -> int:
    if value > high:
        raise InvalidArgument(f"{path} must be at most {high}, not {value}", field=path)
    return value


def number(value: float, path: str, *, low: float = 0.0, high: float = math.inf) -> float:
    """A finite number in low .. high."""
    if not math.isfinite(value) or not low <= value <= high:
        raise InvalidArgument(f"{path} must be a finite number in {low} .. {high}, not {value}", field=path)
    return value


def positive(value: float, path: str) -> float:
    """A finite number above zero."""
    if not math.isfinite(value) or value <= 0:
        raise InvalidArgument(f"{path} must be a finite number above 0, not {value}", field=path)
    return value


def one_of(value: str, allowed: Sequence[str], path: str) -> str:
    if value not in allowed:
        raise InvalidArgument(f"{path} must be one of {', '.join(allowed)}, not {value!r}", field=path)
    return value


def enum_of(value: int, known: Mapping[int, T], path: str) -> T:
    """The vocabulary's value of an enum number; 0 (unspecified) and numbers from the future are refused."""
    if value not in known:
        what = "is missing" if value == 0 else f"has the unknown value {value}"
        raise InvalidArgument(f"{path} {what}", field=path)
    return known[value]


def present(message: Message, name: str, path: str) -> None:
    """A sub-message or optional scalar that must be set."""
    if not message.HasField(name):
        raise InvalidArgument(f"{path}.{name} is missing", field=f"{path}.{name}")


def only_one(items: Sequence[T], path: str) -> T:
    """The one item of a list that has one per layer group: more than one group is not built yet."""
    if not items:
        raise InvalidArgument(f"{path} is missing or empty", field=path)
    if len(items) > 1:
        raise Unimplemented(f"{path}: {len(items)} layer groups are not supported yet, only one", field=path)
    return items[0]
