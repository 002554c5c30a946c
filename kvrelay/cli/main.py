"""The `kvrelay` command. Chooses the fast way for roles' processes and health checks, else the typer application."""

from __future__ import annotations

import os
import sys

INTERRUPTED = 130
"""As kvrelay.cli.problems has it: nothing is imported before Ctrl-C is looked after."""


def main() -> None:
    """Entry point: ends the process with the command's exit code."""
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # else a server that stops is told as if it were a fault
    try:
        sys.exit(_run(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _run(arguments: list[str]) -> int:
    from kvrelay.cli.role_names import ROLES

    if arguments and arguments[0] in ROLES:
        from kvrelay.cli.roles import run_role

        return run_role(arguments[0], arguments[1:])
    if arguments and arguments[0] == "health":
        from kvrelay.cli.health import run_health

        return run_health(arguments[1:])
    from kvrelay.cli.app import app

    app(prog_name="kvrelay")
    return 0


if __name__ == "__main__":
    main()
