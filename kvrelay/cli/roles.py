"""`kvrelay coordinator | prefill | decode`: one process of one role. Knows the configs' fields, not what roles do.

The flags are the fields of the role's config. Kept off typer, so that a role's process starts without it.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from kvrelay import fault_points
from kvrelay.cli.parent import die_with_parent
from kvrelay.cli.problems import EXIT_CONFIG, report
from kvrelay.cli.role_names import ABOUT, EXAMPLES
from kvrelay.config import CoordinatorConfig, WorkerConfig
from kvrelay.config_load import CHOICES, keys_of, load_coordinator, load_worker
from kvrelay.errors import InvalidArgument, KVRelayError
from kvrelay.requests import Role

HELP = {
    "listen": "HOST:PORT to serve on; port 0 picks a free one",
    "model": "model id (`kvrelay models list`) or a Hugging Face directory",
    "executor": "what computes the tokens; hash and scripted need no torch and are for tests",
    "queue_limit": "requests that may wait for a placement; one more is refused at once",
    "open_limit": "requests that may be open at once",
    "max_attempts": "attempts of one request that may be lost with their workers; then it ends ABORTED",
    "local_prefill_below": "prompts with fewer uncached tokens are computed by decode itself",
    "router": "how workers are chosen; all but the first are for comparing with",
    "max_request_bytes": "largest request message accepted",
    "slow_reader_bytes": "unread answer text after which a client is cut off",
    "trace_dir": "write OTLP JSON traces into this folder",
    "otlp_endpoint": "send traces to this OTLP gRPC endpoint",
    "trace_ratio": "share of traces that is kept, 0 to 1",
    "trace_slow_s": "keep the trace of a request with a wait longer than this, whatever the ratio; 0: do not",
    "metrics": "HOST:PORT of a Prometheus endpoint",
    "http": "HOST:PORT to serve OpenAI's HTTP API on, beside gRPC; default: off",
    "advertise": "HOST:PORT that others reach this worker at; default: the listen address",
    "coordinators": "coordinators to register with: A,B or the flag repeated",
    "worker_id": "name of this worker; default: drawn at start",
    "dtype": "of weights and KV",
    "transport": "how KV blocks travel",
    "threads": "compute threads",
    "block_size": "token slots of a KV block",
    "num_blocks": "blocks of the KV pool; 0: as many as --pool-mb holds",
    "pool_mb": "size of the KV pool in MiB",
    "step_tokens": "most tokens of one forward pass; longer prompts are split",
    "step_target_s": "prefill: cut prompts so that a step lasts about this long at most",
    "max_sequences": "most sequences of one batch",
    "attention": "attention backend",
    "script": "file of token ids that the scripted executor emits",
    "step_seconds": "hash and scripted executors: pretend that a step takes this long",
    "token_seconds": "hash and scripted executors: and each token of a prompt so much longer",
    "drain_grace_s": "from SIGTERM to the end: what runs may finish meanwhile, the rest is moved to other workers",
    "prefix_cache": "keep full KV blocks after their request ended, for others that begin alike",
    "preempt": "decode: what becomes of the blocks of a sequence that must make room",
    "swap_mb": "decode: host memory in MiB for such blocks",
    "verify_kv": "prefill: send a checksum with each KV block; decode: check it, and take only blocks that have one",
}


def run_role(name: str, argv: Sequence[str]) -> int:
    """Run one role until it is told to stop; returns the process's exit code (78: fix the configuration first)."""
    options = vars(build_parser(name).parse_args(argv))
    parent_pid, path = options.pop("parent_pid"), options.pop("config")
    if parent_pid:
        die_with_parent(parent_pid)
    try:
        fault_points.obey(os.environ)
    except ValueError as error:
        report(InvalidArgument(str(error), field=fault_points.ORDER))
        return EXIT_CONFIG
    try:
        if name == "coordinator":
            config = load_coordinator(_flags(options), path=path, env=os.environ)
            from coordinator.main import run_coordinator

            return run_coordinator(config, _say_ready)
        worker = load_worker(Role(name), _flags(options), path=path, env=os.environ)
        from worker.main import run_worker

        return run_worker(worker, _say_ready)
    except KVRelayError as error:
        report(error)
        return EXIT_CONFIG


def build_parser(name: str) -> argparse.ArgumentParser:
    """One flag per field of the role's config; values stay text, the loader checks them."""
    parser = argparse.ArgumentParser(
        f"kvrelay {name}", description=ABOUT[name], epilog=f"Example: {EXAMPLES[name]}", allow_abbrev=False
    )
    kind = CoordinatorConfig if name == "coordinator" else WorkerConfig
    for key, hint in keys_of(kind).items():
        flag = "--coordinator" if key == "coordinators" else flag_of(key)
        choices, default = CHOICES.get(key), _shown_default(kind, key)
        if hint is bool:
            switch = argparse.BooleanOptionalAction
            parser.add_argument(
                flag, dest=key, action=switch, default=None, help=f"{HELP[key]} (default: {_on_off(kind, key)})"
            )
            continue
        meta = "|".join(choices) if choices else _meta(key, hint)
        action = "append" if key == "coordinators" else "store"
        parser.add_argument(flag, dest=key, action=action, metavar=meta, help=HELP[key] + default)
    parser.add_argument("--config", default=os.environ.get("KVRELAY_CONFIG", ""), metavar="FILE", help="TOML file")
    parser.add_argument("--die-with-parent", dest="parent_pid", type=int, default=0, help=argparse.SUPPRESS)
    return parser


def _meta(key: str, hint: object) -> str:
    if hint is float:
        return "SHARE" if key.endswith("_ratio") else "SECONDS"
    return "N" if hint is int else key.upper()


def flag_of(key: str) -> str:
    return "--" + key.replace("_", "-")


def _shown_default(kind: type, key: str) -> str:
    default = kind.__dataclass_fields__[key].default  # type: ignore[attr-defined]  # a dataclass
    text = ",".join(default) if isinstance(default, tuple) else str(default)
    return f" (default {text})" if text else ""


def _on_off(kind: type, key: str) -> str:
    return "on" if kind.__dataclass_fields__[key].default else "off"  # type: ignore[attr-defined]  # a dataclass


def _flags(options: dict[str, object]) -> dict[str, object]:
    """Repeated --coordinator values, each maybe A,B, become one list."""
    given = options.get("coordinators")
    if isinstance(given, list):
        options["coordinators"] = ",".join(given)
    return options


def _say_ready(address: str) -> None:
    print(f"ready {address}", flush=True)
