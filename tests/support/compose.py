"""The compose file as an engine reads it: variables of compose/.env put in, one profile's services at a time."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from kvrelay.cli.roles import build_parser
from kvrelay.config import CoordinatorConfig, WorkerConfig
from kvrelay.config_load import load_coordinator, load_worker
from kvrelay.requests import Role

REPOSITORY = Path(__file__).parents[2]
FOLDER = REPOSITORY / "compose"
PROFILES = ("cpu", "gpu", "gpu-infiniband", "observability")
OWN_IMAGE = "kvrelay-"
VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")


def variables() -> dict[str, str]:
    """What compose/.env sets."""
    lines = (line for line in (FOLDER / ".env").read_text().splitlines() if line and not line.startswith("#"))
    return dict(line.split("=", 1) for line in lines)


def document() -> dict[str, Any]:
    """compose.yaml with every variable replaced. KeyError: one that has neither a value in .env nor a default."""
    known = variables()
    return _filled(yaml.safe_load((FOLDER / "compose.yaml").read_text()), known)


def _filled(value: Any, known: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _filled(inner, known) for key, inner in value.items()}
    if isinstance(value, list):
        return [_filled(inner, known) for inner in value]
    if isinstance(value, str):
        return VARIABLE.sub(lambda m: known.get(m[1]) or m[2] if m[2] is not None else known[m[1]], value)
    return value


def services(profile: str = "") -> dict[str, dict[str, Any]]:
    """Name -> service; of one profile only, if one is named."""
    every: dict[str, dict[str, Any]] = document()["services"]
    return {name: service for name, service in every.items() if not profile or profile in service["profiles"]}


def own_services(profile: str = "") -> dict[str, dict[str, Any]]:
    """Those that run a process of KVRelay."""
    return {
        name: service
        for name, service in services(profile).items()
        if service["image"].startswith(OWN_IMAGE) and "entrypoint" not in service
    }


def seconds(duration: str) -> float:
    """Of a duration like 20s or 1m30s."""
    parts = re.findall(r"(\d+)(h|m|s)", duration)
    assert parts, duration
    return sum(int(number) * {"h": 3600, "m": 60, "s": 1}[unit] for number, unit in parts)


def config_of(service: dict[str, Any]) -> CoordinatorConfig | WorkerConfig:
    """What the process will run with: its command line over its environment, read as the process itself does."""
    role, *flags = service["command"]
    options = vars(build_parser(role).parse_args(flags))
    del options["parent_pid"], options["config"]
    env = {key: value for key, value in service["environment"].items() if key.startswith("KVRELAY_")}
    if role == "coordinator":
        return load_coordinator(options, env=env)
    options["coordinators"] = ",".join(options["coordinators"])
    return load_worker(Role(role), options, env=env)
