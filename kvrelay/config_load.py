"""Reads a process's configuration from its four sources. Knows the configs' fields and the standard library, no more.

Weakest first: defaults, a TOML file, KVRELAY_* variables, flags. In the file, top-level `model` and `executor` are for
every process; [coordinator], [worker] (then [prefill] or [decode], which win over it) and [up] are for one kind.
Every mistake is an InvalidArgument whose `field` is the key as the user wrote it.
"""

from __future__ import annotations

import difflib
import math
import tomllib
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TypeVar

from kvrelay.config import (
    DTYPES,
    EXECUTORS,
    PREEMPT,
    ROUTERS,
    TRANSPORTS,
    CoordinatorConfig,
    UpConfig,
    WorkerConfig,
)
from kvrelay.errors import InvalidArgument
from kvrelay.requests import Role

SHARED_KEYS = ("model", "executor")
FLAG_ONLY = ("role", "die_with_parent")
OTHER_VARIABLES = tuple(
    "KVRELAY_" + name
    for name in ("CONFIG", "TARGET", "CACHE", "LOG", "LOG_LEVEL", "LINEAR", "CPU_KERNEL", "FAULT_POINT", "FAULT_PROOF")
)
"""Read elsewhere: the file itself, the address for clients, the folder of models and kernels, logs, kernels to take,
faults that tests ask for."""
CHOICES = {
    "executor": EXECUTORS,
    "dtype": DTYPES,
    "transport": TRANSPORTS,
    "attention": ("auto", "reference", "cpu"),
    "router": ROUTERS,
    "preempt": PREEMPT,
}
AT_LEAST = {
    "queue_limit": 0,
    "open_limit": 1,
    "max_attempts": 1,
    "local_prefill_below": 0,
    "max_request_bytes": 1,
    "slow_reader_bytes": 1,
    "threads": 1,
    "block_size": 1,
    "num_blocks": 0,
    "pool_mb": 1,
    "step_tokens": 1,
    "max_sequences": 1,
    "step_seconds": 0,
    "token_seconds": 0,
    "drain_grace_s": 0,
    "swap_mb": 0,
    "prefill": 0,
    "decode": 1,
    "ready_timeout_s": 0,
    "trace_ratio": 0,
    "trace_slow_s": 0,
}
MOST_INT = 2**31 - 1
"""Of any whole number: what workers say of themselves has fields of 32 bits."""
TABLES: dict[str, type] = {
    "coordinator": CoordinatorConfig,
    "worker": WorkerConfig,
    "prefill": WorkerConfig,
    "decode": WorkerConfig,
    "up": UpConfig,
}
KIND_NAMES = {str: "a string", int: "a whole number", float: "a number", bool: "true or false"}

Values = Mapping[str, object]
C = TypeVar("C")


@dataclass(frozen=True, slots=True)
class _Source:
    """One source: its values, how it spells a key, and whether numbers come as text."""

    values: Values
    spell: Callable[[str], str]
    textual: bool


def load_coordinator(flags: Values, *, path: str = "", env: Mapping[str, str] | None = None) -> CoordinatorConfig:
    """flags: key -> value or text, None where not given; path "": no file."""
    return _build(CoordinatorConfig, _sources(("coordinator",), flags, path, env or {}), {})


def load_worker(role: Role, flags: Values, *, path: str = "", env: Mapping[str, str] | None = None) -> WorkerConfig:
    """As load_coordinator; the table [prefill] or [decode] wins over [worker]."""
    return _build(WorkerConfig, _sources(("worker", role.value), flags, path, env or {}), {"role": role})


def load_up(flags: Values, *, path: str = "", env: Mapping[str, str] | None = None) -> UpConfig:
    """As load_coordinator, from the table [up]."""
    return _build(UpConfig, _sources(("up",), flags, path, env or {}), {})


def keys_of(kind: type) -> dict[str, object]:
    """Configurable key -> its type, in the order of the fields."""
    hints = typing.get_type_hints(kind)
    return {f.name: hints[f.name] for f in fields(kind) if f.name not in FLAG_ONLY}


def read_file(path: str) -> dict[str, Values]:
    """The file's tables, all keys known. Top-level keys stand under "". InvalidArgument names what is wrong."""
    try:
        document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        words = f"cannot read the configuration file {path}: {error.strerror or error}"
        raise InvalidArgument(words, field="config") from error
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"cannot read the configuration file {path}: {error}", field="config") from error
    except tomllib.TOMLDecodeError as error:
        raise InvalidArgument(f"{path} is not valid TOML: {error}", field="config") from error
    top = {key: value for key, value in document.items() if not isinstance(value, dict)}
    tables: dict[str, Values] = {"": top}
    for name in top.keys() & TABLES.keys():
        raise InvalidArgument(f"{name} must be a table: write [{name}]", field=name)
    _require_known(top, SHARED_KEYS, lambda key: key, hints=(*SHARED_KEYS, *TABLES))
    for name, table in document.items():
        if not isinstance(table, dict):
            continue
        _require_known((name,), TABLES, lambda key: f"[{key}]")
        _require_known(table, keys_of(TABLES[name]), _under(name))
        tables[name] = table
    return tables


def check_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Key -> text of all KVRELAY_* variables; one that no process knows is an error."""
    known = {f"KVRELAY_{key.upper()}" for kind in TABLES.values() for key in keys_of(kind)}
    ours = {name: text for name, text in env.items() if name.startswith("KVRELAY_")}
    _require_known(ours, {*known, *OTHER_VARIABLES}, lambda key: key)
    return {name.removeprefix("KVRELAY_").lower(): text for name, text in ours.items() if name in known}


def parse_address(text: str) -> tuple[str, int]:
    """HOST:PORT -> (host, port); ValueError says what is wrong. An IPv6 host stands in brackets and keeps them."""
    host, colon, port = text.rpartition(":")
    is_port = port.isascii() and port.isdigit() and int(port) <= 65535
    if not colon or not host or "/" in host or len(host.split()) != 1 or not is_port:
        raise ValueError(f"must be HOST:PORT with a port of 0 to 65535, not {text!r}")
    return host, int(port)


def _sources(tables: tuple[str, ...], flags: Values, path: str, env: Mapping[str, str]) -> Iterator[_Source]:
    if path:
        document = read_file(path)
        kind = keys_of(TABLES[tables[0]])
        yield _Source({k: v for k, v in document[""].items() if k in kind}, lambda key: key, textual=False)
        for name in tables:
            yield _Source(document.get(name, {}), _under(name), textual=False)
    yield _Source(check_variables(env), lambda key: f"KVRELAY_{key.upper()}", textual=True)
    given = {key: value for key, value in flags.items() if value is not None}
    yield _Source(given, lambda key: "--" + key.replace("_", "-"), textual=True)


def _build(kind: type[C], sources: Iterable[_Source], fixed: dict[str, object]) -> C:
    hints = typing.get_type_hints(kind)
    values = dict(fixed)
    for source in sources:
        for key in hints:
            if key in source.values and key not in fixed:
                name = source.spell(key)
                values[key] = _checked(key, _typed(source.values[key], hints[key], name, source.textual), name)
    return kind(**values)


def _typed(value: object, hint: object, name: str, textual: bool) -> object:
    """`value` as the type `hint`, or InvalidArgument that names the key."""
    if hint == tuple[str, ...]:
        parts = value.split(",") if textual and isinstance(value, str) else value
        if not isinstance(parts, (list, tuple)) or not all(isinstance(part, str) and part for part in parts):
            raise InvalidArgument(f"{name} must be a list of strings, not {value!r}", field=name)
        return tuple(parts)
    if textual and isinstance(value, str) and hint is not str:
        value = _parsed(value, hint)
    if hint is float and type(value) is int:
        value = float(value)
    if type(value) is not hint:
        wanted = KIND_NAMES.get(hint, "another type") if isinstance(hint, type) else "another type"
        raise InvalidArgument(f"{name} must be {wanted}, not {value!r}", field=name)
    return value


def _parsed(text: str, hint: object) -> object:
    """Text of a variable or flag -> a value; the text itself where it does not parse."""
    try:
        if hint is int:
            return int(text)
        if hint is float:
            return float(text)
    except ValueError:
        return text
    return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}.get(text.lower(), text)


def _checked(key: str, value: object, name: str) -> object:
    choices = CHOICES.get(key)
    if choices and value not in choices:
        near = nearest(str(value), choices)
        raise InvalidArgument(f"{name} must be one of {', '.join(choices)}, not {value!r}{near}", field=name)
    least = AT_LEAST.get(key)
    if least is not None and isinstance(value, (int, float)) and not least <= value < math.inf:
        raise InvalidArgument(f"{name} must be at least {least}, not {value!r}", field=name)
    most = 1 if key == "trace_ratio" else MOST_INT if type(value) is int else math.inf
    if isinstance(value, (int, float)) and value > most:
        raise InvalidArgument(f"{name} must be at most {most}, not {value!r}", field=name)
    if key == "listen" or (key in ("advertise", "metrics", "http") and value):
        _require_address(str(value), name)
    if key == "otlp_endpoint" and value:
        host_and_port = str(value).removeprefix("http://").removeprefix("https://").rstrip("/")
        _require_address(host_and_port, name)
    if key == "coordinators" and isinstance(value, tuple):
        for address in value:
            _require_address(address, name)
    return value


def _under(table: str) -> Callable[[str], str]:
    """How the file spells a key of one table."""
    return lambda key: f"{table}.{key}"


def _require_address(text: str, name: str) -> None:
    try:
        parse_address(text)
    except ValueError as error:
        raise InvalidArgument(f"{name} {error}", field=name) from error


def _require_known(
    keys: Iterable[str], known: Iterable[str], spell: Callable[[str], str], hints: Iterable[str] | None = None
) -> None:
    valid = tuple(known)
    for key in keys:
        if key not in valid:
            near = nearest(key, tuple(hints or valid))
            raise InvalidArgument(f"{spell(key)} is not a known setting{near}", field=spell(key))


def nearest(word: str, words: Iterable[str]) -> str:
    """ "; did you mean X?" for the closest of `words`, or "" where none is close."""
    close = difflib.get_close_matches(word, list(words), n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""
