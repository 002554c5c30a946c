"""How the command line says that something went wrong: exit codes and the two shapes of an error on stderr."""

from __future__ import annotations

import json
import re
import sys

from kvrelay.errors import KVRelayError

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_CONFIG = 78
"""sysexits' EX_CONFIG: the configuration or the model is wrong, so starting again would not help."""
EXIT_INTERRUPTED = 130


def error_code(error: KVRelayError) -> str:
    """The gRPC status name of an error: that of the class directly under KVRelayError, LIKE_THIS."""
    families = [kind for kind in type(error).__mro__ if kind.__base__ is KVRelayError]
    return re.sub(r"(?<!^)(?=[A-Z])", "_", families[0].__name__).upper() if families else "UNKNOWN"


def error_object(error: KVRelayError) -> dict[str, dict[str, str]]:
    """What `--json` prints on stderr."""
    return {"error": {"code": error_code(error), "message": error.message, "field": error.field}}


def error_line(error: KVRelayError) -> str:
    """One line for people; names the field where the message does not."""
    field = f"{error.field}: " if error.field and error.field not in error.message else ""
    return " ".join(f"kvrelay: {field}{error.message}".split())


def report(error: KVRelayError, as_json: bool = False) -> None:
    """Print the error on stderr in the shape asked for."""
    text = json.dumps(error_object(error), ensure_ascii=False) if as_json else error_line(error)
    print(text, file=sys.stderr, flush=True)
