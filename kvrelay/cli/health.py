"""`kvrelay health`: one gRPC health check of one process. Knows no service's meaning; kept off typer to start fast.

Containers run it every few seconds (compose/compose.yaml), so it loads little more than gRPC itself.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence

from kvrelay.cli.problems import EXIT_FAILED, report
from kvrelay.config import DEFAULT_TARGET
from kvrelay.errors import KVRelayError, NotFound

ABOUT = "Ask one process whether it is well (gRPC health): exit code 0 if it says SERVING, else 1."
EXAMPLE = "kvrelay health 127.0.0.1:50061 --service kvrelay.v1.InferenceService"
SERVICE_HELP = (
    "one service of it, or at a coordinator a role: kvrelay.prefill, kvrelay.decode (docs/errors.md); "
    "default: the whole process"
)
TIMEOUT_S = 3.0


def run_health(argv: Sequence[str]) -> int:
    """Print the status in one word, or as JSON; 0 for SERVING, 1 for all else and for an error."""
    options = build_parser().parse_args(argv)
    try:
        status = check(options.target, options.service, options.timeout_s)
    except KVRelayError as error:
        report(error, options.as_json)
        return EXIT_FAILED
    answer = {"target": options.target, "service": options.service, "status": status}
    print(json.dumps(answer) if options.as_json else status, flush=True)
    return 0 if status == "SERVING" else EXIT_FAILED


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "kvrelay health", description=ABOUT, epilog=f"Example: {EXAMPLE}", allow_abbrev=False
    )
    default = os.environ.get("KVRELAY_TARGET") or DEFAULT_TARGET
    parser.add_argument("target", nargs="?", default=default, metavar="HOST:PORT", help=f"default {default}")
    parser.add_argument("--service", default="", metavar="NAME", help=SERVICE_HELP)
    parser.add_argument(
        "--timeout-s", type=float, default=TIMEOUT_S, metavar="SECONDS", help=f"for an answer (default {TIMEOUT_S:g})"
    )
    parser.add_argument("--json", dest="as_json", action="store_true", help="one JSON object on stdout")
    return parser


def check(target: str, service: str, timeout_s: float) -> str:
    """The status that the process at `target` has for a service, "" for itself: SERVING, NOT_SERVING or UNKNOWN.

    NotFound: it has no such service. Unavailable, DeadlineExceeded: it cannot be reached, or does not answer.
    """
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from kvrelay.rpc.channel import open_sync_channel
    from kvrelay.rpc.status import from_rpc_error

    with open_sync_channel(target) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=service), timeout=timeout_s
            )
        except grpc.RpcError as failed:
            error = from_rpc_error(failed)
            if isinstance(error, NotFound):  # the health library says no more than "not found" of it, or nothing
                raise NotFound(f"{target} has no service named {service!r}", field="service") from failed
            raise error from failed
    name: str = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return name
