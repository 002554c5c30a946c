"""Where turns come from: lines of a terminal, with history and editing, or of a pipe. Knows no conversation."""

from __future__ import annotations

import contextlib
import sys

PROMPT = "> "
MORE = ". "


class Lines:
    """stdin, a turn at a time. interactive: somebody types them."""

    def __init__(self) -> None:
        self.interactive = sys.stdin.isatty()
        if self.interactive:
            with contextlib.suppress(ImportError):  # a Python that was built without it
                import readline  # noqa: F401  # `input` finds it: editing, and what was typed before
        reconfigure = getattr(sys.stdin, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="surrogateescape")  # a byte that is no UTF-8 costs its turn, not the conversation

    def turn(self) -> str | None:
        """What was said next, without empty lines; None at the end. A line that ends with a backslash goes on."""
        parts: list[str] = []
        while True:
            line = self._line(MORE if parts else PROMPT)
            if line is None:
                return "\n".join(parts) or None
            if line.endswith("\\"):
                parts.append(line[:-1])
                continue
            parts.append(line)
            said = "\n".join(parts)
            if said.strip():
                return said
            parts.clear()

    def _line(self, prompt: str) -> str | None:
        if not self.interactive:
            line = sys.stdin.readline()
            return line.rstrip("\r\n") if line else None
        try:
            if sys.stdout.isatty():
                return input(prompt)
            print(prompt, end="", file=sys.stderr, flush=True)  # stdout is for answers alone
            return input()
        except EOFError:
            print(file=sys.stderr)
            return None
