"""Commands that wait to be sent to one worker: ordered, bounded; cancels overtake. Knows no wire."""

from __future__ import annotations

from collections import deque

from kvrelay.session import Abort, Command, Prefill, Reserve, Start

MAX_COMMANDS = 4096
"""A worker that leaves so many unread is as good as lost."""


class CommandOutbox:
    """First in, first out, but an Abort goes to the front and takes the unsent commands of its attempt with it.

    That of one sequence takes nothing with it, and follows what is unsent of its attempt: others need their Start.
    """

    def __init__(self) -> None:
        self._commands: deque[Command] = deque()

    def __len__(self) -> int:
        return len(self._commands)

    @property
    def full(self) -> bool:
        return len(self._commands) >= MAX_COMMANDS

    def put(self, command: Command) -> None:
        if not isinstance(command, Abort) or (command.sequence is not None and self._waits(command)):
            self._commands.append(command)
        elif command.sequence is not None or not self._take_back(command):
            self._commands.appendleft(command)

    def pop(self) -> Command:
        return self._commands.popleft()

    def _waits(self, abort: Abort) -> bool:
        return any(_attempt_of(command) == (abort.request_id, abort.attempt) for command in self._commands)

    def _take_back(self, abort: Abort) -> bool:
        """Remove what is unsent of the attempt. True if its opening command was: then the worker never knew of it."""
        unknown = False
        kept: deque[Command] = deque()
        for command in self._commands:
            opens = isinstance(command, Prefill | Reserve)
            if _attempt_of(command) == (abort.request_id, abort.attempt):
                unknown = unknown or opens
            else:
                kept.append(command)
        self._commands = kept
        return unknown


def _attempt_of(command: Command) -> tuple[str, int] | None:
    if isinstance(command, Prefill | Reserve):
        return command.work.request_id, command.work.attempt
    return (command.request_id, command.attempt) if isinstance(command, Start | Abort) else None
