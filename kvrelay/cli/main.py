"""The `kvrelay` command. Chooses the fast way for roles' processes and the typer application for all else."""

from __future__ import annotations

import sys

from kvrelay.cli.roles import ROLES, run_role


def main() -> None:
    """Entry point: ends the process with the command's exit code."""
    arguments = sys.argv[1:]
    if arguments and arguments[0] in ROLES:
        sys.exit(run_role(arguments[0], arguments[1:]))
    from kvrelay.cli.app import app

    app(prog_name="kvrelay")


if __name__ == "__main__":
    main()
