"""What a line that begins with / does to a conversation, and what is told of it. Knows no terminal and no client."""

from __future__ import annotations

import json
from pathlib import Path

from kvrelay.cli.chat_history import Conversation
from kvrelay.errors import InvalidArgument, NotFound

HELP = """\
/help          this list
/reset         forget all turns; the system message stays
/undo          take the last turn back
/system TEXT   set the system message; without TEXT: show it
/save FILE     write the messages as JSON
/exit          leave, as Ctrl-D does
A line that ends with \\ goes on in the next one. // at the beginning stands for /. Ctrl-C ends an answer."""


def is_command(said: str) -> bool:
    """Whether what was said is a command. `//` begins what is meant for the model."""
    return said.startswith("/") and not said.startswith("//")


def run_command(said: str, conversation: Conversation) -> str | None:
    """Runs it and returns what is told of it; None: leave. InvalidArgument, NotFound say what is wrong with it."""
    name, _, rest = said.partition(" ")
    text = rest.strip()
    match name.strip():
        case "/help":
            return HELP
        case "/exit" | "/quit":
            return None
        case "/reset":
            conversation.reset()
            return "all turns are forgotten"
        case "/undo":
            return _undo(conversation)
        case "/system":
            return _system(conversation, text)
        case "/save":
            return _save(conversation, text)
    raise NotFound(f"no command {name.strip()}: see /help, or write / twice to begin a message with it")


def _undo(conversation: Conversation) -> str:
    turn = conversation.undo()
    return "there is no turn to take back" if turn is None else f"taken back: {_short(turn.user)}"


def _system(conversation: Conversation, text: str) -> str:
    if text:
        conversation.system = text
        return "the system message is set"
    return conversation.system or "there is no system message"


def _save(conversation: Conversation, path: str) -> str:
    """As a list of messages that any chat API takes."""
    if not path:
        raise InvalidArgument("/save needs the name of a file")
    messages = conversation.transcript()
    try:
        Path(path).write_text(json.dumps(messages, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"cannot write {path}: {getattr(error, 'strerror', None) or error}") from error
    return f"{len(messages)} messages written to {path}"


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else line[:57] + "..."
